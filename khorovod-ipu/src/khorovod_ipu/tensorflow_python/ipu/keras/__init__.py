"""Models of ``tf.keras`` under the names that the SDK had for them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from khorovod_ipu.tensorflow.settings import missing

__all__ = ["Model", "Sequential"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise missing(__name__, name)
    return getattr(tf.keras, name)
