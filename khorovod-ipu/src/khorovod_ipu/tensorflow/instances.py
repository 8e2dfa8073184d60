"""``tensorflow.python.ipu.distributed``: collectives between the instances of poprun, on the host."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.errors import MismatchError

__all__ = ["allgather", "allreduce", "broadcast"]

_LAYOUTS = "Tensor layouts did not match on all instances"
#: The maximum number of dimensions of TensorFlow's own operations.
_MOST_DIMENSIONS = 8
#: Number of uses of each key, by graph.
_keys: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


def _checked(kind: str, value: Any, name: str | None, call: Callable[[Any, str | None], Any]) -> Any:
    """Call a collective; if tensors disagree, raise the SDK's error.

    Args:
        kind: name of the collective; operations of different kinds never match.
        value: the tensor.
        name: key of the match; None takes the tensor's name in a graph, and a number with eager execution.
        call: function of the tensor and the key.
    """
    tensor = tf.convert_to_tensor(value)
    if not tf.executing_eagerly():
        key = _unused(f"instances.{kind}.{name or tensor.name}")
        with tf.control_dependencies([_layouts_agree(tensor, key)]):
            return call(tensor, key)
    try:
        return call(tensor, name)
    except MismatchError as error:
        raise tf.errors.InvalidArgumentError(None, None, f"{_LAYOUTS}: {error}") from error


def _unused(key: str) -> str:
    """Return a key that no other operation of this graph has."""
    count = _keys.setdefault(tf.compat.v1.get_default_graph(), Counter())
    count[key] += 1
    return f"{key}.{count[key]}"


def _layouts_agree(tensor: Any, key: str) -> Any:
    """Return an operation that fails on all instances if dtypes or shapes disagree."""
    with tf.device("/device:CPU:0"):
        shape = tf.shape(tensor, tf.int64)
        parts = [[tensor.dtype.as_datatype_enum], [tf.rank(tensor)], shape, tf.zeros([_MOST_DIMENSIONS], tf.int64)]
        layout = tf.concat([tf.cast(part, tf.int64) for part in parts], 0)[: _MOST_DIMENSIONS + 2]
        layouts = hvd.allgather(layout[tf.newaxis], name=f"{key}.layout", ignore_name_scope=True)
        said = [f"{_LAYOUTS}. Of each of them: number of the dtype, dimensions, shape"]
        return tf.debugging.Assert(tf.reduce_all(tf.equal(layouts, layout)), [*said, layouts], summarize=-1)


def allreduce(value: Any, reduce_op: Any = tf.distribute.ReduceOp.SUM, tensor_name: str | None = None) -> Any:
    """Combine a tensor over all instances.

    In graphs, instances may call in different orders, because the name of the operation is the key.

    Args:
        value: same shape and dtype on all instances.
        reduce_op: SUM or MEAN.
        tensor_name: key of the match.

    Raises:
        Exception: ``tf.errors.InvalidArgumentError``: shapes or dtypes disagree.
    """
    mean = tf.distribute.ReduceOp(reduce_op) == tf.distribute.ReduceOp.MEAN

    def reduced(tensor: Any, key: str | None) -> Any:
        return hvd.allreduce(tensor, op=hvd.Average if mean else hvd.Sum, name=key, ignore_name_scope=True)

    return _checked("mean" if mean else "sum", value, tensor_name, reduced)


def allgather(value: Any, tensor_name: str | None = None) -> Any:
    """Stack the tensors of all instances.

    Args:
        value: same shape and dtype on all instances.
        tensor_name: key of the match.

    Returns:
        A tensor with a new first dimension, whose length is the number of instances.

    Raises:
        Exception: ``tf.errors.InvalidArgumentError``: shapes or dtypes disagree.
    """

    def gathered(tensor: Any, key: str | None) -> Any:
        return hvd.allgather(tf.expand_dims(tensor, 0), name=key, ignore_name_scope=True)

    return _checked("allgather", value, tensor_name, gathered)


def broadcast(value: Any, root_rank: int = 0, tensor_name: str | None = None) -> Any:
    """Return one instance's tensor on all instances.

    Args:
        value: same shape and dtype on all instances.
        root_rank: index of the sending instance.
        tensor_name: key of the match.

    Raises:
        Exception: ``tf.errors.InvalidArgumentError``: shapes or dtypes disagree.
    """

    def sent(tensor: Any, key: str | None) -> Any:
        return hvd.broadcast(tensor, root_rank, name=key, ignore_name_scope=True)

    return _checked(f"broadcast.{root_rank}", value, tensor_name, sent)
