"""Values of variables kept beyond a step: TensorFlow writes to other memory while a reference to them exists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tensorflow.python.ops.gen_resource_variable_ops import read_variable_op

from horovod.tensorflow import xla

__all__ = ["array_of", "changes_all", "changes_early", "hold", "put"]

_SMALL_NBYTES = 1 << 16


def hold(variables: Sequence[Any]) -> list[Any]:
    """Return the values of variables without a copy; TensorFlow copies a variable at its next in-place change."""
    return [read_variable_op(variable.handle, variable.dtype) for variable in variables]


def put(variables: Sequence[Any], held: Sequence[Any]) -> None:
    """Set values that ``hold`` returned."""
    for variable, value in zip(variables, held, strict=True):
        variable.assign(value)


def array_of(variable: Any) -> Any:
    """Return the value of a variable as a numpy array, without a copy if it is in host memory."""
    value = read_variable_op(variable.handle, variable.dtype)
    return np.asarray(value) if value.shape.rank else np.asarray(value.numpy())


def changes_all(is_known: bool) -> bool:
    """Return whether a failed step may have changed any variable: XLA reuses their memory for other values.
    ``is_known``: a step was done before, so that its compilation mode is known.
    """
    return not is_known or bool(xla.used)


def changes_early(variables: Sequence[Any]) -> list[Any]:
    """Return the variables that a ``tf.function`` step may change before it has the gradients of all ranks.

    These are the untrained variables: step counters, moving averages, random states. A large one with the shape of
    a trained variable is assumed to be an optimizer slot, which changes together with that variable.
    """
    trained = {tuple(variable.shape) for variable in variables if variable.trainable}
    return [v for v in variables if not v.trainable and (_is_small(v) or tuple(v.shape) not in trained)]


def _is_small(variable: Any) -> bool:
    return bool((variable.shape.num_elements() or 0) * variable.dtype.size <= _SMALL_NBYTES)
