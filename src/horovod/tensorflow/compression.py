"""Compression for TensorFlow's tensors: ``Compression.none``, ``.fp16`` and ``.bf16``."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf

from horovod.bindings.compression import CastCompressor, Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _TensorFlowCast(CastCompressor):
    @staticmethod
    def cast(tensor: Any, dtype: tf.DType) -> Any:
        """Return ``tensor`` as ``dtype``; differentiable."""
        return tf.cast(tensor, dtype)


class FP16Compressor(_TensorFlowCast):
    """Sends floating-point tensors as float16: half the bytes, 11 bits of precision, at most 65504."""

    wire_dtype = tf.float16
    from_dtypes = frozenset({tf.float32, tf.float64, tf.bfloat16})


class BF16Compressor(_TensorFlowCast):
    """Sends floating-point tensors as bfloat16: half the bytes, 8 bits of precision, float32's range."""

    wire_dtype = tf.bfloat16
    from_dtypes = frozenset({tf.float32, tf.float64, tf.float16})


class Compression:
    """The compressors there are; pass one as ``compression=hvd.Compression.fp16``."""

    none: ClassVar[type[Compressor]] = NoneCompressor
    fp16: ClassVar[type[Compressor]] = FP16Compressor
    bf16: ClassVar[type[Compressor]] = BF16Compressor
