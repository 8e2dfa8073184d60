"""What feeds a program."""

from __future__ import annotations

from khorovod_ipu.tensorflow.queues import IPUInfeedQueue, IPUIterator

__all__ = ["IPUInfeedQueue", "IPUIterator"]
