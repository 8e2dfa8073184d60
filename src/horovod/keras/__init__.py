"""horovod for Keras 3, on its backends TensorFlow, torch and JAX: ``import horovod.keras as hvd``.

    optimizer           DistributedOptimizer, and PartialDistributedOptimizer with local layers; mixed precision
    callbacks           callbacks for ``model.fit(callbacks=)``
    elastic             training that continues when ranks are lost or join
    values              collectives on numbers, arrays, tensors and variables

``horovod._keras`` is the code shared with ``horovod.tensorflow.keras``.
This module re-exports the names that training scripts use.
"""

from horovod._keras.public import make_load_model, of_name
from horovod.bindings import common_names
from horovod.bindings.common_names import *  # noqa: F403 - all of it, by its own list
from horovod.bindings.misuse import not_installed

try:
    import keras
except ModuleNotFoundError as error:
    raise not_installed(error, "keras", "keras") from None

from horovod.bindings.objects import allgather_object, broadcast_object
from horovod.keras import callbacks, elastic, values
from horovod.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from horovod.keras.values import *  # noqa: F403 - all of it, by its own list

_backend = of_name(keras.backend.backend())
_comm = _backend.comm

Compression = _backend.compression
barrier = _comm.barrier
load_model = make_load_model(keras.saving.load_model, DistributedOptimizer)

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "callbacks",
    "elastic",
    "load_model",
]
__all__ += values.__all__
__all__ += common_names.__all__
