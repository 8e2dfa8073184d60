"""How the device is configured."""

from __future__ import annotations

from khorovod_ipu.tensorflow.options import IPUConfig

__all__ = ["IPUConfig"]
