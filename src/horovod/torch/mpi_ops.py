"""All operations on tensors in one module; also the import path that Horovod's scripts use.

The differentiable ones come from ``horovod.torch.ops``; the others are the plain collectives, without a layer
in between.
"""

from __future__ import annotations

import torch

from horovod.bindings import common_names
from horovod.bindings.basics import HorovodBasics
from horovod.bindings.common_names import *  # noqa: F403 - all of it, by its own list
from horovod.bindings.process_sets import at_init
from horovod.bindings.reductions import resolve_op
from horovod.core.requests import ReduceOp
from horovod.torch.compression import Compression
from horovod.torch.ops import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from horovod.torch.runtime import comm
from horovod.torch.sparse import sparse_allreduce_async
from horovod.torch.uneven import uneven_inputs
from horovod.torch.unsafe import keep_out_of_graphs

__all__ = [
    "Compression",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "empty",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
    "uneven_inputs",
    "zeros",
]
__all__ += common_names.__all__

# Private names in Horovod, too, but other libraries use them.
_NULL = ""
_basics = HorovodBasics()
_handle_map = comm._open

at_init(keep_out_of_graphs)


allreduce_ = comm.allreduce_
allreduce_async = comm.allreduce_async
allreduce_async_ = comm.allreduce_async_
grouped_allreduce_ = comm.grouped_allreduce_
grouped_allreduce_async = comm.grouped_allreduce_async
grouped_allreduce_async_ = comm.grouped_allreduce_async_
allgather_async = comm.allgather_async
grouped_allgather_async = comm.grouped_allgather_async
broadcast_ = comm.broadcast_
broadcast_async = comm.broadcast_async
broadcast_async_ = comm.broadcast_async_
alltoall_async = comm.alltoall_async
reducescatter_async = comm.reducescatter_async
grouped_reducescatter_async = comm.grouped_reducescatter_async
barrier = comm.barrier
join = comm.join
poll = comm.poll
synchronize = comm.synchronize
empty = comm.empty
zeros = comm.zeros


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> ReduceOp:
    """Return the reduction that ``op`` or Horovod's older ``average`` selects.

    Args:
        op: Average, Sum, Adasum, Min, Max or Product.
        average: deprecated.

    Raises:
        ValueError: both are given.
    """
    return resolve_op(op, average)


def _check_has_gpu() -> bool:
    return torch.cuda.is_available()
