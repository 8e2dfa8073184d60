"""``tensorflow.python.ipu.distributed``: collectives between the instances of poprun, on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.errors import MismatchError

__all__ = ["allgather", "allreduce", "broadcast"]

_LAYOUTS = "Tensor layouts did not match on all instances"
#: What TensorFlow's own operations allow.
_MOST_DIMENSIONS = 8


def _checked(value: Any, name: str | None, call: Callable[[Any], Any]) -> Any:
    """Call a collective; where tensors disagree, with the SDK's words for it."""
    tensor = tf.convert_to_tensor(value)
    if not tf.executing_eagerly():
        with tf.control_dependencies([_layouts_agree(tensor, name)]):
            return call(tensor)
    try:
        return call(tensor)
    except MismatchError as error:
        raise tf.errors.InvalidArgumentError(None, None, f"{_LAYOUTS}: {error}") from error


def _layouts_agree(tensor: Any, name: str | None) -> Any:
    """Return an operation that fails on all instances where dtypes or shapes disagree."""
    key = f"{name or tensor.name}_layout"
    with tf.device("/device:CPU:0"):
        shape = tf.shape(tensor, tf.int64)
        parts = [[tensor.dtype.as_datatype_enum], [tf.rank(tensor)], shape, tf.zeros([_MOST_DIMENSIONS], tf.int64)]
        layout = tf.concat([tf.cast(part, tf.int64) for part in parts], 0)[: _MOST_DIMENSIONS + 2]
        layouts = hvd.allgather(layout[tf.newaxis], name=key)
        said = [f"{_LAYOUTS}. Of each of them: number of the dtype, dimensions, shape"]
        return tf.debugging.Assert(tf.reduce_all(tf.equal(layouts, layout)), [*said, layouts], summarize=-1)


def allreduce(value: Any, reduce_op: Any = tf.distribute.ReduceOp.SUM, tensor_name: str | None = None) -> Any:
    """Combine a tensor over all instances.

    In graphs instances may call in different orders: the name of the operation is the key.

    Args:
        value: same shape and dtype on all instances.
        reduce_op: SUM or MEAN.
        tensor_name: key of the match.

    Raises:
        Exception: ``tf.errors.InvalidArgumentError``: shapes or dtypes disagree.
    """
    op = hvd.Average if tf.distribute.ReduceOp(reduce_op) == tf.distribute.ReduceOp.MEAN else hvd.Sum
    return _checked(value, tensor_name, lambda tensor: hvd.allreduce(tensor, op=op, name=tensor_name))


def allgather(value: Any, tensor_name: str | None = None) -> Any:
    """Stack the tensors of all instances.

    Args:
        value: same shape and dtype on all instances.
        tensor_name: key of the match.

    Returns:
        A tensor with one more dimension, the first, as long as there are instances.

    Raises:
        Exception: ``tf.errors.InvalidArgumentError``: shapes or dtypes disagree.
    """
    return _checked(value, tensor_name, lambda tensor: hvd.allgather(tf.expand_dims(tensor, 0), name=tensor_name))


def broadcast(value: Any, root_rank: int = 0, tensor_name: str | None = None) -> Any:
    """Return one instance's tensor on all.

    Args:
        value: same shape and dtype on all instances.
        root_rank: which instance.
        tensor_name: key of the match.

    Raises:
        Exception: ``tf.errors.InvalidArgumentError``: shapes or dtypes disagree.
    """
    return _checked(value, tensor_name, lambda tensor: hvd.broadcast(tensor, root_rank, name=tensor_name))
