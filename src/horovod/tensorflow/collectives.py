"""The collectives on several dense tensors in every mode of TensorFlow: eager, under a tape, in a graph.

Eager tensors without a tape go directly to the engine. All other calls become a graph node.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from horovod import context
from horovod.bindings.collectives import check_root
from horovod.bindings.misuse import is_integer
from horovod.bindings.process_sets import ProcessSet
from horovod.bindings.reductions import Reduction, check_factors
from horovod.bindings.submission import id_of
from horovod.core.requests import Kind
from horovod.engine.calls import call
from horovod.errors import RequestError
from horovod.tensorflow.failures import translated
from horovod.tensorflow.nodes import is_recorded, node, refuse_parallel, unique_name, user_site
from horovod.tensorflow.requests import OP_TYPES, GraphRequest
from horovod.tensorflow.runtime import comm

__all__ = [
    "after_all",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "members_of",
    "place_of",
    "query",
    "reducescatter",
    "speaks_tensorflow",
    "start_allreduce",
]

_F = TypeVar("_F", bound=Callable[..., Any])
#: The last join or barrier of each graph; collectives made later depend on it.
_last_of_all: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def speaks_tensorflow(function: _F) -> _F:
    """Make a function raise errors that are both ours and TensorFlow's."""

    @functools.wraps(function)
    def speaking(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (ValueError, RuntimeError) as error:
            other = translated(error)
            if other is error:
                raise
            raise other from None

    return speaking  # type: ignore[return-value]


def _settings(how: Reduction) -> dict[str, Any]:
    """A reduction as settings of a node."""
    prescale, postscale = check_factors(how.prescale, how.postscale)
    return {"op": how.op, "prescale": prescale, "postscale": postscale, "process_set": id_of(how.process_set)}


def _is_plain(tensors: Sequence[Any]) -> bool:
    return tf.executing_eagerly() and not is_recorded(tensors)


def _node(
    op_type: str,
    tensors: Sequence[Any],
    outputs: Sequence[tf.DType],
    name: str | None,
    ignore_name_scope: bool,
    **settings: Any,
) -> list[Any]:
    if tf.executing_eagerly():
        return node(op_type, tensors, outputs, GraphRequest(name=name or "", site=user_site(), **settings))
    members = settings.get("process_set", 0)
    if members and members not in context.engine().sets:
        raise RequestError(f"{op_type}: process set {members} does not exist; was it removed?")
    refuse_parallel()
    node_name, key = unique_name(op_type, name, tensors, ignore_name_scope)
    graph = tf.compat.v1.get_default_graph()
    last = _last_of_all.get(graph)
    before = [last] if last is not None and _context_of(last) is graph._get_control_flow_context() else []
    with tf.control_dependencies(before):
        return node(op_type, tensors, outputs, GraphRequest(name=key, site=user_site(), **settings), node_name)


def _context_of(operation: Any) -> Any:
    return operation._get_control_flow_context()


def _op_type(name: str, tensors: Sequence[Any]) -> str:
    return f"Horovod{'Grouped' if len(tensors) > 1 else ''}{name}"


def allreduce(
    tensors: Sequence[Any], how: Reduction, name: str | None = None, ignore_name_scope: bool = False, parts: str = ""
) -> list[Any]:
    """Combine tensors over all ranks as one operation; ranks compare ``parts``, which says what the tensors are."""
    if _is_plain(tensors):
        return list(comm._run(call(Kind.ALLREDUCE, name, parts=parts, **_settings(how)), tensors))
    outputs = _node(
        _op_type("Allreduce", tensors), tensors, [t.dtype for t in tensors], name, ignore_name_scope, parts=parts,
        **_settings(how),
    )  # fmt: skip
    return [_shaped(output, tensor.shape) for output, tensor in zip(outputs, tensors, strict=True)]


def start_allreduce(tensors: Sequence[Any], how: Reduction, name: str, parts: str) -> int:
    """Start an eager ``allreduce``, and return its handle."""
    return comm._start(call(Kind.ALLREDUCE, name, parts=parts, **_settings(how)), tensors, many=True)


def allgather(
    tensors: Sequence[Any], process_set: ProcessSet, name: str | None = None, ignore_name_scope: bool = False,
    parts: str = "",
) -> list[Any]:  # fmt: skip
    """Concatenate every rank's tensors along the first dimension as one operation; ``parts`` as in ``allreduce``."""
    if _is_plain(tensors):
        return list(comm._run(call(Kind.ALLGATHER, name, id_of(process_set), parts=parts), tensors))
    outputs = _node(
        _op_type("Allgather", tensors), tensors, [t.dtype for t in tensors], name, ignore_name_scope, parts=parts,
        process_set=id_of(process_set),
    )  # fmt: skip
    return [_rows_unknown(output, tensor) for output, tensor in zip(outputs, tensors, strict=True)]


def broadcast(
    tensor: Any, root_rank: int, process_set: ProcessSet, name: str | None = None, ignore_name_scope: bool = False
) -> Any:
    """Return the root's tensor."""
    if _is_plain([tensor]):
        return comm.broadcast(tensor, root_rank, name, process_set)
    (output,) = _node(
        "HorovodBroadcast", [tensor], [tensor.dtype], name, ignore_name_scope, root=check_root(root_rank),
        process_set=id_of(process_set),
    )  # fmt: skip
    return _shaped(output, tensor.shape)


def alltoall(
    tensor: Any, splits: Any, process_set: ProcessSet, name: str | None = None, ignore_name_scope: bool = False
) -> tuple[Any, Any]:
    """Send rows to every rank; return the received rows and the number of rows from each rank."""
    if _is_plain([tensor]):
        received: tuple[Any, Any] = comm.synchronize(comm.alltoall_async(tensor, splits, name, process_set))
        return received
    numbers = tf.zeros([0], tf.int32) if splits is None else tf.convert_to_tensor(splits, tf.int32)
    output, came = _node(
        "HorovodAlltoall", [tensor, numbers], [tensor.dtype, tf.int32], name, ignore_name_scope, even=splits is None,
        process_set=id_of(process_set),
    )  # fmt: skip
    return _rows_unknown(output, tensor), _shaped(
        came, tf.TensorShape([None if context.is_elastic() else process_set.size()])
    )


def reducescatter(
    tensors: Sequence[Any], how: Reduction, name: str | None = None, ignore_name_scope: bool = False
) -> list[Any]:
    """Combine tensors over all ranks as one operation, and keep this rank's rows."""
    if _is_plain(tensors):
        return list(comm.grouped_reducescatter(tensors, name, **how.keywords))
    outputs = _node(
        _op_type("Reducescatter", tensors), tensors, [t.dtype for t in tensors], name, ignore_name_scope,
        **_settings(how),
    )  # fmt: skip
    return [_rows_unknown(output, tensor) for output, tensor in zip(outputs, tensors, strict=True)]


def after_all(kind: Kind, process_set: ProcessSet, outputs: Sequence[tf.DType]) -> Any:
    """Add an operation without inputs that runs after all collectives already in the graph. Return its output tensor,
    or itself if it has none.
    """
    graph = tf.compat.v1.get_default_graph()
    here = graph._get_control_flow_context()
    before = [op for op in graph.get_operations() if op.type in OP_TYPES and _context_of(op) is here]
    with tf.control_dependencies(before):
        (made,) = _node(f"Horovod{kind.name.capitalize()}", [], outputs, None, False, process_set=id_of(process_set))
    _last_of_all[graph] = made.op if outputs else made
    return _shaped(made, tf.TensorShape([])) if outputs else made


def members_of(process_set: ProcessSet) -> Any:
    """Return the number of a set's members; an operation in a traced function of an elastic job."""
    return query("HorovodSize", id_of(process_set), None) if _outlives_ranks() else process_set.size() or 1


def place_of(process_set: ProcessSet) -> Any:
    """Return this rank's index in a set; an operation as in ``members_of``, but only for the set of all ranks."""
    if _outlives_ranks() and not process_set.process_set_id:
        return query("HorovodRank", 0, None)
    return process_set.rank()


def _outlives_ranks() -> bool:
    return context.is_elastic() and not tf.executing_eagerly()


def query(op_type: str, process_set_id: int, name: str | None) -> Any:
    """Return a query as a tensor, found when the graph runs; under XLA when it is compiled, unless the job is elastic.

    Raises:
        TypeError: the id is no integer, as that of a process set that is not registered.
    """
    if not is_integer(process_set_id):
        raise TypeError(
            "process_set_id must be an integer, such as hvd.add_process_set(ranks).process_set_id. "
            f"Received: {process_set_id!r}"
        )
    (number,) = node(op_type, [], [tf.int32], GraphRequest(process_set=int(process_set_id), site=user_site()), name)
    return _shaped(number, tf.TensorShape([]))


def _shaped(tensor: Any, shape: tf.TensorShape) -> Any:
    if not tf.executing_eagerly():
        tensor.set_shape(shape)
    return tensor


def _rows_unknown(tensor: Any, like: Any) -> Any:
    rank = like.shape.rank
    if rank:
        return _shaped(tensor, tf.TensorShape([None]).concatenate(like.shape[1:]))
    return tensor
