"""horovod for PyTorch: ``import horovod.torch as hvd``.

This module re-exports the names that training scripts use.
"""

from __future__ import annotations

from typing import Any

from horovod.bindings.misuse import not_installed

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise not_installed(error, "torch", "torch") from None

from horovod.torch import elastic, functions, mpi_ops
from horovod.torch.functions import *  # noqa: F403 - all of it, by its own list
from horovod.torch.mpi_ops import *  # noqa: F403 - all of it, by its own list
from horovod.torch.mpi_ops import _check_has_gpu as _check_has_gpu
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "DistributedOptimizer",
    "SyncBatchNorm",
    "elastic",
]
__all__ += functions.__all__
__all__ += mpi_ops.__all__


def __getattr__(name: str) -> Any:
    # For type checkers, which do not resolve a list of names through two modules.
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
