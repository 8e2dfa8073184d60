"""Every operation on tensors under one roof; also the import path that Horovod's scripts use.

Those that autograd may go through are in ``horovod.torch.ops``; the others are the collectives as they
are, without a layer in between.
"""

from __future__ import annotations

import torch

from horovod.bindings.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovod.core.requests import ReduceOp
from horovod.errors import HorovodInternalError
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
    "synchronize",
    "zeros",
]

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

init = comm.init
shutdown = comm.shutdown
is_initialized = comm.is_initialized
rank = comm.rank
size = comm.size
local_rank = comm.local_rank
local_size = comm.local_size
cross_rank = comm.cross_rank
cross_size = comm.cross_size
is_homogeneous = comm.is_homogeneous
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


def _check_has_gpu() -> bool:
    return torch.cuda.is_available()
