"""Where later SDKs keep ``pipelining_ops``."""

from __future__ import annotations

from tensorflow.python.ipu import pipelining_ops

__all__ = ["pipelining_ops"]
