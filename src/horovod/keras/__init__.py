"""horovod for Keras 3, on its backends TensorFlow, torch and JAX: ``import horovod.keras as hvd``.

    optimizer           DistributedOptimizer, and the one with local layers
    members, reduction  what makes an optimizer a distributed one; how gradients are combined
    loss_scale          mixed precision
    agreement           whether all ranks train the same model
    callbacks           what goes into ``model.fit(callbacks=)``
    values              collectives on numbers, arrays, tensors and variables
    saving              load_model
    on_tensorflow, on_torch, on_jax     the backends; only the one in use is loaded

This module gathers the names of a training script.
"""

from __future__ import annotations

from typing import Any

import keras

from horovod._keras import choice
from horovod.bindings.later import explain
from horovod.bindings.objects import allgather_object, broadcast_object
from horovod.bindings.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovod.bindings.reductions import Adasum, Average, Max, Min, Product, Sum
from horovod.errors import HorovodInternalError
from horovod.keras import callbacks
from horovod.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from horovod.keras.saving import load_model
from horovod.keras.values import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    reducescatter,
)

_backend = choice.of_name(keras.backend.backend())
_comm = _backend.comm

Compression = _backend.compression
init = _comm.init
shutdown = _comm.shutdown
is_initialized = _comm.is_initialized
size = _comm.size
rank = _comm.rank
local_size = _comm.local_size
local_rank = _comm.local_rank
cross_size = _comm.cross_size
cross_rank = _comm.cross_rank
is_homogeneous = _comm.is_homogeneous
barrier = _comm.barrier
start_timeline = _comm.start_timeline
stop_timeline = _comm.stop_timeline
stats = _comm.stats
mpi_threads_supported = _comm.mpi_threads_supported
mpi_built = _comm.mpi_built
mpi_enabled = _comm.mpi_enabled
gloo_built = _comm.gloo_built
gloo_enabled = _comm.gloo_enabled
nccl_built = _comm.nccl_built
ddl_built = _comm.ddl_built
ccl_built = _comm.ccl_built
cuda_built = _comm.cuda_built
rocm_built = _comm.rocm_built

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stats",
    "stop_timeline",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(explain(f"keras.{name}") or f"module {__name__!r} has no attribute {name!r}")
