"""Synchronize variables and Python objects across ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from horovod.bindings import objects
from horovod.bindings.agreement import agree_on_count
from horovod.bindings.docstrings import explained_like
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.tensorflow import collectives
from horovod.tensorflow.collectives import speaks_tensorflow
from horovod.tensorflow.first_step import note_broadcast, tensorflows
from horovod.tensorflow.runtime import comm

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]

_SESSION = "accepted and ignored."


@speaks_tensorflow
def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Copy the root's values to every rank, in place.

    Collective over ``process_set``; variables are matched by their position in the list.

    Args:
        variables: TensorFlow or Keras variables; same number, order, shapes and dtypes on every rank.
        root_rank: global rank that sends its values.
        process_set: ranks that take part.
        inplace: accepted and ignored: the broadcast is always in place.

    Returns:
        In a graph of TensorFlow 1, the operation that broadcasts; else None.

    Raises:
        ValueError: an element of ``variables`` is not a variable.
        MismatchError: numbers of variables, shapes or dtypes disagree; on every rank.
        PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.

    Blocks until all values have arrived.
    """
    if tensorflows(variables) is not None or not isinstance(variables, Iterable):
        kind = type(variables).__name__
        raise ValueError(f"broadcast_variables takes a list of variables, such as model.variables. Received: {kind}")
    targets = []
    for variable in variables:
        if (target := tensorflows(variable)) is None:
            raise ValueError(
                f"broadcast_variables takes variables of TensorFlow or Keras. Received: {type(variable).__name__}"
            )
        targets.append(target)
    note_broadcast(targets)
    if tf.executing_eagerly():
        return _broadcast_now(targets, root_rank, process_set)
    # A graph cannot raise here, so compare the number of variables as a shape, before ranks wait for missing ones.
    number = tf.zeros([len(targets)], tf.bool)
    as_many = collectives.broadcast(number, root_rank, process_set, "broadcast_variables.number_of_variables")
    assigned = []
    with tf.control_dependencies([as_many]):
        for index, variable in enumerate(targets):
            key = f"broadcast_variables_{index}"
            value = collectives.broadcast(variable.read_value(), root_rank, process_set, key)
            assigned.append(variable.assign(value, read_value=False))
    return None if tf.compat.v1.get_default_graph().building_function else tf.group(*assigned)


def _broadcast_now(targets: Sequence[tf.Variable], root_rank: int, process_set: ProcessSet) -> None:
    agree_on_count("broadcast_variables", [variable.name for variable in targets], process_set)
    handles = [
        comm.broadcast_async(variable.read_value(), root_rank, f"broadcast_variables_{index}", process_set)
        for index, variable in enumerate(targets)
    ]
    for variable, handle in zip(targets, handles, strict=True):
        variable.assign(comm.synchronize(handle))


def broadcast_global_variables(root_rank: int) -> Any:
    """Return the operation that copies the root's values of all graph variables to every rank.

    Args:
        root_rank: global rank that sends its values.

    Raises:
        RuntimeError: execution is eager, so there is no graph.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() needs a graph of TensorFlow 1; "
            "with eager execution use hvd.broadcast_variables(<model or optimizer>.variables, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Copies the root's values of all variables to every rank when a session of TensorFlow 1 begins.

    Args:
        root_rank: global rank that sends its values.
        device: device of the operation; tensors still go through host memory.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Add the operation to the graph."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the broadcast."""
        session.run(self.bcast_op)


@speaks_tensorflow
@explained_like(objects.broadcast_object, session=_SESSION)
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a Python object from one rank to all others.

    Collective over ``process_set``.

    Returns:
        ``obj`` itself on the root, a copy elsewhere.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return ``fn(obj)``, which sends a Python object from one rank to all others. See ``broadcast_object``."""

    def send(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return send


@speaks_tensorflow
@explained_like(objects.allgather_object, session=_SESSION)
def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Collect one Python object of every rank.

    Collective over ``process_set``.

    Returns:
        The objects in the order of the members' ranks, without those of ranks that joined.
    """
    return objects.allgather_object(obj, name, process_set)
