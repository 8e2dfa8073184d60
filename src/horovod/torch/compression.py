"""Horovod's import path of the compressors; ``horovod.bindings.compression`` defines them."""

from __future__ import annotations

import torch

from horovod.bindings.compression import (
    BF16Compressor,
    BucketCompressor,
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
    cast,
)
from horovod.transports.kernels_torch import DTYPES

__all__ = ["BF16Compressor", "BucketCompressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


@cast.register
def _(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    return tensor.to(DTYPES[dtype])
