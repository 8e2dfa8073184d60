"""horovod for PyTorch: ``import horovod.torch as hvd``.

    mpi_ops             every operation on tensors; from ops (differentiable) and the plain collectives
    functions           parameters, optimizer state and Python objects of all ranks made the same
    optimizer           DistributedOptimizer, over horovod.bindings.gradients; unbucketed and adasum are its parts
    gradient_adapter    what horovod.bindings.gradients needs to know about torch
    sync_batch_norm     BatchNorm over all ranks' batches
    uneven              ranks with different numbers of batches
    compression         what goes over the wire
    adapter             what the framework-free bindings need to know about torch
    inference           tensors made in inference mode, as any thread may use them
    runtime             the one object that all of the above go through

This module gathers the names of a training script.
"""

from __future__ import annotations

from typing import Any

from horovod.bindings.later import explain
from horovod.bindings.misuse import not_installed

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise not_installed(error, "torch", "torch") from None

from horovod.torch import mpi_ops
from horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from horovod.torch.mpi_ops import *  # noqa: F403 - all of it, by its own list
from horovod.torch.mpi_ops import _check_has_gpu as _check_has_gpu
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "DistributedOptimizer",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
__all__ += mpi_ops.__all__


def __getattr__(name: str) -> Any:
    raise AttributeError(explain(f"torch.{name}") or f"module {__name__!r} has no attribute {name!r}")
