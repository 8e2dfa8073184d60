"""Programs of the device."""

from __future__ import annotations

from khorovod_ipu.tensorflow.programs import compiled as compile

__all__ = ["compile"]
