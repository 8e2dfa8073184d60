"""Everything that moves tensors or says who we are under one roof; also the import path that Horovod's scripts use."""

from __future__ import annotations

from horovod.bindings.basics import HorovodBasics
from horovod.bindings.reductions import Adasum, Average, Max, Min, Product, Sum
from horovod.tensorflow.ops import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
)
from horovod.tensorflow.queries import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op
from horovod.tensorflow.runtime import comm

_basics = HorovodBasics()

init = comm.init
shutdown = comm.shutdown
is_initialized = comm.is_initialized
is_homogeneous = comm.is_homogeneous
rank = comm.rank
size = comm.size
local_rank = comm.local_rank
local_size = comm.local_size
cross_rank = comm.cross_rank
cross_size = comm.cross_size
start_timeline = comm.start_timeline
stop_timeline = comm.stop_timeline
stats = comm.stats
mpi_threads_supported = comm.mpi_threads_supported
mpi_enabled = comm.mpi_enabled
mpi_built = comm.mpi_built
gloo_enabled = comm.gloo_enabled
gloo_built = comm.gloo_built
nccl_built = comm.nccl_built
ddl_built = comm.ddl_built
ccl_built = comm.ccl_built
cuda_built = comm.cuda_built
rocm_built = comm.rocm_built

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "ccl_built",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stats",
    "stop_timeline",
]


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of two, which Horovod's Adasum needed; ours does not.

    Args:
        num_rank: the number.
    """
    return num_rank > 0 and num_rank & (num_rank - 1) == 0
