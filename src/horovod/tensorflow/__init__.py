"""horovod for TensorFlow: ``import horovod.tensorflow as hvd``.

    ops                   the collectives; over collectives (dense tensors) and sparse (IndexedSlices)
    queries               rank and size as operations of a graph
    functions             variables and Python objects of all ranks made the same
    tape                  DistributedGradientTape
    optimizer             DistributedOptimizer; gradient_aggregation adds up several passes
    reducing              which gradients travel together
    sync_batch_norm       BatchNormalization over all ranks' batches
    compression           what goes over the wire
    elastic               states and decorators for jobs whose ranks come and go; held keeps values beyond a step
    gradients             the derivatives of the collectives
    nodes, kernels        operations of graphs, and what they do; over library, TensorFlow's C interface
    adapter, failures     what the framework-free bindings need to know about TensorFlow, and its error classes
    runtime               the one object that all of the above go through

This module gathers the names of a training script.
"""

from __future__ import annotations

from typing import Any

from horovod.bindings.misuse import not_installed

try:
    import tensorflow as _tensorflow  # noqa: F401
except ModuleNotFoundError as error:
    raise not_installed(error, "tensorflow", "tensorflow") from None

from horovod.tensorflow import elastic, mpi_ops
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
from horovod.tensorflow.mpi_ops import *  # noqa: F403 - all of it, by its own list
from horovod.tensorflow.optimizer import DistributedOptimizer
from horovod.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from horovod.tensorflow.util import _allreduce as _allreduce
from horovod.tensorflow.util import _cache as _cache
from horovod.tensorflow.util import _executing_eagerly as _executing_eagerly
from horovod.tensorflow.util import _grouped_allreduce as _grouped_allreduce
from horovod.tensorflow.util import _make_allreduce_grads_fn as _make_allreduce_grads_fn
from horovod.tensorflow.util import _make_subgraph as _make_subgraph
from horovod.tensorflow.util import _reducescatter as _reducescatter
from horovod.tensorflow.util import refs_to_vars as refs_to_vars
from horovod.tensorflow.util import vars_to_refs as vars_to_refs

__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "LocalGradientAggregationHelper",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "elastic",
]
__all__ += mpi_ops.__all__

try:
    from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization
except ImportError:
    # tf.keras is asked for here only: with TF_USE_LEGACY_KERAS=1 it needs tf_keras, which Keras 3 does without.
    __all__.remove("SyncBatchNormalization")


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNormalization":
        raise ImportError("hvd.SyncBatchNormalization needs tf.keras, which cannot be imported: install tf_keras")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
