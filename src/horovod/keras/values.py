"""Collectives on numbers, arrays, tensors and variables; see ``horovod._keras.values``."""

import keras

from horovod._keras.public import of_name
from horovod._keras.values import Values

__all__ = ["allgather", "allreduce", "broadcast", "broadcast_global_variables", "broadcast_variables", "reducescatter"]

_values = Values(of_name(keras.backend.backend()), keras.ops.convert_to_tensor)

allgather = _values.allgather
allreduce = _values.allreduce
broadcast = _values.broadcast
broadcast_global_variables = _values.broadcast_global_variables
broadcast_variables = _values.broadcast_variables
reducescatter = _values.reducescatter
