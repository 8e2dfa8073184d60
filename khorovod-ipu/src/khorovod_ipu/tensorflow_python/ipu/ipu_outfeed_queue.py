"""What a program gives back."""

from __future__ import annotations

from khorovod_ipu.tensorflow.queues import IPUOutfeedMode, IPUOutfeedQueue

__all__ = ["IPUOutfeedMode", "IPUOutfeedQueue"]
