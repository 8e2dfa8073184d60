"""Compression for torch tensors: ``Compression.none``, ``.fp16`` and ``.bf16``."""

from __future__ import annotations

from typing import ClassVar

import torch

from horovod.bindings.compression import CastCompressor, Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _TorchCast(CastCompressor):
    @staticmethod
    def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return ``tensor`` as ``dtype``; differentiable."""
        return tensor.to(dtype)


class FP16Compressor(_TorchCast):
    """Sends floating-point tensors as float16: half the bytes, 11 bits of precision, at most 65504."""

    wire_dtype = torch.float16
    from_dtypes = frozenset({torch.float32, torch.float64, torch.bfloat16})


class BF16Compressor(_TorchCast):
    """Sends floating-point tensors as bfloat16: half the bytes, 8 bits of precision, float32's range."""

    wire_dtype = torch.bfloat16
    from_dtypes = frozenset({torch.float32, torch.float64, torch.float16})


class Compression:
    """The compressors there are; pass one as ``compression=hvd.Compression.fp16``."""

    none: ClassVar[type[Compressor]] = NoneCompressor
    fp16: ClassVar[type[Compressor]] = FP16Compressor
    bf16: ClassVar[type[Compressor]] = BF16Compressor
