"""What feeds a program."""

from __future__ import annotations

from khorovod_ipu.tensorflow.queues import IPUInfeedQueue

__all__ = ["IPUInfeedQueue"]
