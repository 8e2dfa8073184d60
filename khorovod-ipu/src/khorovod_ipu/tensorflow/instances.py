"""``tensorflow.python.ipu.distributed``: collectives between the instances of poprun, on the host."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.errors import MismatchError

__all__ = ["allgather", "allreduce", "broadcast"]

_LAYOUTS = "Tensor layouts did not match on all instances"


def _checked(call: Any) -> Any:
    try:
        return call()
    except MismatchError as error:
        raise tf.errors.InvalidArgumentError(None, None, f"{_LAYOUTS}: {error}") from error


def allreduce(value: Any, reduce_op: Any = tf.distribute.ReduceOp.SUM, tensor_name: str | None = None) -> Any:
    """Combine a tensor over all instances.

    In graphs instances may call in different orders: the name of the operation is the key.

    Args:
        value: same shape and dtype on all instances.
        reduce_op: SUM or MEAN.
        tensor_name: key of the match.

    Raises:
        Exception: ``tf.errors.InvalidArgumentError``: shapes or dtypes disagree (eager).
    """
    op = hvd.Average if tf.distribute.ReduceOp(reduce_op) == tf.distribute.ReduceOp.MEAN else hvd.Sum
    return _checked(lambda: hvd.allreduce(tf.convert_to_tensor(value), op=op, name=tensor_name))


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
    return _checked(lambda: hvd.allgather(tf.expand_dims(value, 0), name=tensor_name))


def broadcast(value: Any, root_rank: int = 0, tensor_name: str | None = None) -> Any:
    """Return one instance's tensor on all.

    Args:
        value: same shape and dtype on all instances.
        root_rank: which instance.
        tensor_name: key of the match.

    Raises:
        Exception: ``tf.errors.InvalidArgumentError``: shapes or dtypes disagree.
    """
    return _checked(lambda: hvd.broadcast(tf.convert_to_tensor(value), root_rank, name=tensor_name))
