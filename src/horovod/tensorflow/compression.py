"""Horovod's import path of the compressors; ``horovod.bindings.compression`` defines them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod.bindings.compression import (
    BF16Compressor,
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
    cast,
)

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


@cast.register(tf.Tensor)
def _(tensor: Any, dtype: str) -> Any:
    return tf.cast(tensor, dtype)
