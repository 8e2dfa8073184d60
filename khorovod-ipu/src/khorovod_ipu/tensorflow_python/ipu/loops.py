"""Loops within a program."""

from __future__ import annotations

from khorovod_ipu.tensorflow.programs import repeat

__all__ = ["repeat"]
