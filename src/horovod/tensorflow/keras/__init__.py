"""horovod for ``tf.keras``, be it Keras 3 or, with TF_USE_LEGACY_KERAS=1, tf_keras.

    optimizer           DistributedOptimizer with Horovod's order of arguments
    legacy              what makes an optimizer of tf_keras a distributed one
    callbacks           what goes into ``model.fit(callbacks=)``
    elastic             training that goes on when ranks come and go

Everything else is that of ``horovod.keras``. This module gathers the names of a training script.
"""

from __future__ import annotations

import tensorflow as tf

from horovod._keras.on_tensorflow import backend
from horovod._keras.saving import make_load_model
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
