"""Compression for JAX arrays: ``Compression.none``, ``.fp16`` and ``.bf16``."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from horovod.bindings.compression import CastCompressor, Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _JaxCast(CastCompressor):
    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """Return ``tensor`` as ``dtype``; differentiable."""
        return tensor.astype(dtype)


class FP16Compressor(_JaxCast):
    """Sends floating-point arrays as float16: half the bytes, 11 bits of precision, at most 65504."""

    wire_dtype = np.dtype(jnp.float16)
    from_dtypes = frozenset(map(np.dtype, (jnp.float32, jnp.float64, jnp.bfloat16)))


class BF16Compressor(_JaxCast):
    """Sends floating-point arrays as bfloat16: half the bytes, 8 bits of precision, float32's range."""

    wire_dtype = np.dtype(jnp.bfloat16)
    from_dtypes = frozenset(map(np.dtype, (jnp.float32, jnp.float64, jnp.float16)))


class Compression:
    """The compressors there are; pass one as ``compression=hvd.Compression.fp16``."""

    none: ClassVar[type[Compressor]] = NoneCompressor
    fp16: ClassVar[type[Compressor]] = FP16Compressor
    bf16: ClassVar[type[Compressor]] = BF16Compressor
