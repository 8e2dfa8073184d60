"""Every operation on tensors under one roof; also the import path that Horovod's scripts use.

Those that autograd may go through are in ``horovod.torch.ops``; the others are the collectives as they
are, without a layer in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod.bindings.basics import HorovodBasics
from horovod.bindings.later import explain
from horovod.bindings.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovod.bindings.reductions import Adasum, Average, Max, Min, Product, Sum, resolve_op
from horovod.core.requests import ReduceOp
from horovod.errors import HorovodInternalError
from horovod.torch.compiling import keep_out_of_graphs
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

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
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
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "empty",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stats",
    "stop_timeline",
    "synchronize",
    "uneven_inputs",
    "zeros",
]

# Private in Horovod as well, and used outside of it all the same.
_NULL = ""
_basics = HorovodBasics()
_handle_map = comm._tickets

shutdown = comm.shutdown
is_initialized = comm.is_initialized
rank = comm.rank
size = comm.size
local_rank = comm.local_rank
local_size = comm.local_size
cross_rank = comm.cross_rank
cross_size = comm.cross_size
is_homogeneous = comm.is_homogeneous
start_timeline = comm.start_timeline
stop_timeline = comm.stop_timeline
stats = comm.stats
mpi_enabled = comm.mpi_enabled
mpi_built = comm.mpi_built
mpi_threads_supported = comm.mpi_threads_supported
gloo_enabled = comm.gloo_enabled
gloo_built = comm.gloo_built
nccl_built = comm.nccl_built
ddl_built = comm.ddl_built
ccl_built = comm.ccl_built
cuda_built = comm.cuda_built
rocm_built = comm.rocm_built

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


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the job that a launcher started, or make a world of one; does nothing when already done.

    Args:
        comm: None for all ranks; a list of some, which then form a job of their own and are numbered as they are
            listed; or a communicator of mpi4py, whose processes form the job.
        process_sets: sets to register at once, the same list on every rank; "dynamic" is accepted and
            changes nothing, since sets can always be added later.

    Raises:
        InitError: the environment is contradictory, or the ranks did not find each other.
        ValueError: a process set is given twice, or cannot exist; this process is not in ``comm``, or runs with
            another one.
        NotImplementedError: process sets made of communicators, in a job made of a list.

    Blocks until all ranks called, or HOROVOD_START_TIMEOUT seconds.
    """
    keep_out_of_graphs()
    _basics.init(comm, process_sets)


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> ReduceOp:
    """Return the reduction that ``op`` and Horovod's older ``average`` ask for.

    Args:
        op: Average, Sum, Adasum, Min, Max or Product.
        average: deprecated.

    Raises:
        ValueError: both are given.
    """
    return resolve_op(op, average)


def __getattr__(name: str) -> Any:
    raise AttributeError(explain(f"torch.{name}") or f"module {__name__!r} has no attribute {name!r}")


def _check_has_gpu() -> bool:
    return torch.cuda.is_available()
