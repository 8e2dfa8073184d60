"""horovod for TensorFlow: ``import horovod.tensorflow as hvd``.

    ops                   the collectives; over collectives (dense tensors) and sparse (IndexedSlices)
    queries               rank and size as operations of a graph
    functions             variables and Python objects of all ranks made the same
    tape                  DistributedGradientTape
    optimizer             DistributedOptimizer; gradient_aggregation adds up several passes
    reducing              which gradients travel together
    sync_batch_norm       BatchNormalization over all ranks' batches
    compression           what goes over the wire
    gradients             the derivatives of the collectives
    nodes, kernels        operations of graphs, and what they do; over library, TensorFlow's C interface
    adapter, failures     what the framework-free bindings need to know about TensorFlow, and its error classes
    runtime               the one object that all of the above go through

This module gathers the names of a training script.
"""

from __future__ import annotations

from typing import Any

from horovod.bindings.later import explain
from horovod.bindings.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from horovod.bindings.reductions import Adasum, Average, Max, Min, Product, Sum
from horovod.errors import HorovodInternalError
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.mpi_ops import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    ccl_built,
    check_num_rank_power_of_2,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank,
    rank_op,
    reducescatter,
    rocm_built,
    shutdown,
    size,
    size_op,
    start_timeline,
    stats,
    stop_timeline,
)
from horovod.tensorflow.optimizer import DistributedOptimizer
from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization
from horovod.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "LocalGradientAggregationHelper",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
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
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stats",
    "stop_timeline",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(explain(f"tensorflow.{name}") or f"module {__name__!r} has no attribute {name!r}")
