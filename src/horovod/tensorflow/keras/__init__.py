"""horovod for ``tf.keras``, be it Keras 3 or, with TF_USE_LEGACY_KERAS=1, tf_keras.

    optimizer           DistributedOptimizer with Horovod's order of arguments
    legacy              what makes an optimizer of tf_keras a distributed one
    callbacks           what goes into ``model.fit(callbacks=)``
    saving              load_model

Everything else is that of ``horovod.keras``. This module gathers the names of a training script.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod._keras.on_tensorflow import backend
from horovod._keras.values import Values
from horovod.bindings.later import explain
from horovod.bindings.objects import allgather_object, broadcast_object
from horovod.bindings.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovod.bindings.reductions import Adasum, Average, Max, Min, Product, Sum
from horovod.errors import HorovodInternalError
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import broadcast_global_variables, broadcast_variables
from horovod.tensorflow.keras import callbacks
from horovod.tensorflow.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from horovod.tensorflow.keras.saving import load_model
from horovod.tensorflow.runtime import comm as _comm

_values = Values(backend, tf.convert_to_tensor)

allgather = _values.allgather
allreduce = _values.allreduce
broadcast = _values.broadcast
reducescatter = _values.reducescatter
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
    raise AttributeError(explain(f"tensorflow.keras.{name}") or f"module {__name__!r} has no attribute {name!r}")
