"""horovod for TensorFlow: ``import horovod.tensorflow as hvd``.

    ops                   the public collectives, built on collectives (dense tensors) and sparse (IndexedSlices)
    mpi_ops               ops, and rank and size as operations of a graph
    functions             synchronization of variables and Python objects across ranks
    tape                  DistributedGradientTape
    optimizer             DistributedOptimizer; gradient_aggregation accumulates several passes
    reducing              grouping of gradients for the reduction
    sync_batch_norm       BatchNormalization over all ranks' batches
    compression           compression of sent tensors
    elastic               states and decorators for elastic jobs; held keeps variable values beyond a step
    gradients             the derivatives of the collectives
    nodes, kernels        graph operations and their kernels, built on library, TensorFlow's C interface
    adapter, failures     adapter for the framework-free bindings, and TensorFlow's error classes
    runtime               the only ``Collectives`` of TensorFlow, used by all modules above

This module re-exports the names that training scripts use.
"""

from __future__ import annotations

from typing import Any

from horovod.bindings.misuse import not_installed

try:
    import tensorflow as _tensorflow  # noqa: F401
except ModuleNotFoundError as error:
    raise not_installed(error, "tensorflow", "tensorflow") from None

from horovod.tensorflow import elastic, functions, mpi_ops
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import *  # noqa: F403 - all of it, by its own list
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
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "LocalGradientAggregationHelper",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "elastic",
]
__all__ += functions.__all__
__all__ += mpi_ops.__all__

try:
    from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization
except ImportError:
    # Only this import needs tf.keras; with TF_USE_LEGACY_KERAS=1 it requires tf_keras, which may be missing.
    __all__.remove("SyncBatchNormalization")


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNormalization":
        raise ImportError("hvd.SyncBatchNormalization needs tf.keras, which cannot be imported: install tf_keras")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
