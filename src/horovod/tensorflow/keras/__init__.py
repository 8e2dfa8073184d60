"""horovod for ``tf.keras``: Keras 3 or, with TF_USE_LEGACY_KERAS=1, tf_keras.

    optimizer           DistributedOptimizer with Horovod's order of arguments
    legacy              distributed optimizers for tf_keras
    callbacks           callbacks for ``model.fit(callbacks=)``
    elastic             training that continues when ranks are lost or join

All other code comes from ``horovod.keras``. This module re-exports the names that training scripts use.
"""

import tensorflow as tf

from horovod._keras.on_tensorflow import backend
from horovod._keras.public import make_load_model
from horovod._keras.values import Values
from horovod.bindings import common_names
from horovod.bindings.common_names import *  # noqa: F403 - all of it, by its own list
from horovod.bindings.objects import allgather_object, broadcast_object
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import broadcast_global_variables, broadcast_variables
from horovod.tensorflow.keras import callbacks, elastic
from horovod.tensorflow.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from horovod.tensorflow.runtime import comm as _comm

_values = Values(backend, tf.convert_to_tensor)

allgather = _values.allgather
allreduce = _values.allreduce
broadcast = _values.broadcast
reducescatter = _values.reducescatter
barrier = _comm.barrier
load_model = make_load_model(tf.keras.models.load_model, DistributedOptimizer)

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += common_names.__all__
