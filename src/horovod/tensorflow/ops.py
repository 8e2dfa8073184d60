"""The collectives of ``horovod.tensorflow``: eager, in ``tf.function``, and in graphs of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.bindings.compression import compress, decompress
from horovod.bindings.docstrings import explained_like
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.bindings.reductions import Reduction, resolve_op
from horovod.core.requests import Kind, ReduceOp
from horovod.tensorflow import collectives, gradients
from horovod.tensorflow.collectives import speaks_tensorflow
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.runtime import comm
from horovod.tensorflow.sparse import allreduce_slices

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]

gradients.register()


def _listed(tensors: Any) -> Any:
    if isinstance(tensors, tf.Tensor | tf.Variable):
        raise ValueError(f"a grouped operation takes a list of tensors. Received: one of shape {tensors.shape}")
    return tensors


def _tensors(values: Sequence[Any]) -> list[Any]:
    for value in values:
        if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
            raise ValueError(f"a {type(value).__name__} cannot be sent as it is; send its parts, or a dense one")
    return [value if isinstance(value, tf.Tensor) else tf.convert_to_tensor(value) for value in values]


@speaks_tensorflow
@explained_like(
    comm.allreduce,
    tensor="same shape and dtype on every rank; is not changed. Of IndexedSlices the number of rows may differ.",
)
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Combine a tensor over all ranks, element by element; differentiable.

    Collective over ``process_set``; calls are matched by ``name``, in a graph by the name of the node. For
    ``tf.IndexedSlices``, the rows of all ranks are gathered.

    Returns:
        A new tensor of the same shape and dtype, or IndexedSlices.

    Raises:
        MismatchError: shapes, dtypes or arguments disagree; on every rank, with each rank's value. It is a
            ``tf.errors.FailedPreconditionError``, too.
        PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it. A
            ``tf.errors.UnknownError``, too.
        ValueError: an argument of this rank is invalid.
        NotInitializedError: ``init()`` was not called.
        NotImplementedError: IndexedSlices with an ``op`` other than Sum and Average, or with a factor.

    Blocks until all ranks called; in a graph, delays only operations that need the result.
    """
    return grouped_allreduce(
        [tensor], average, device_dense, device_sparse, compression, op, prescale_factor, postscale_factor,
        process_set, ignore_name_scope, name,
    )[0]  # fmt: skip


@speaks_tensorflow
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> Any:
    """Combine several tensors over all ranks in one operation; differentiable. See ``allreduce``.

    Returns:
        New tensors, in the order of ``tensors``; an empty list or None as it is.
    """
    if not _listed(tensors):
        return tensors
    how = Reduction(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    return combined(tensors, how, compression, name, ignore_name_scope)


def combined(
    tensors: Sequence[Any], how: Reduction, compression: type[Compressor], name: str | None, ignore_name_scope: bool,
    parts: str = "",
) -> list[Any]:  # fmt: skip
    """Combine dense tensors and IndexedSlices; ranks compare ``parts``, which says what the tensors are."""
    sparse = [index for index, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    dense = [index for index in range(len(tensors)) if index not in sparse]
    results: list[Any] = [None] * len(tensors)
    if sparse:
        key = f"{name}.sparse" if name and dense else name
        gathered = allreduce_slices([tensors[i] for i in sparse], how, key, ignore_name_scope, parts)
        for index, result in zip(sparse, gathered, strict=True):
            results[index] = result
    if dense:
        wires, contexts = compress(compression, _tensors([tensors[i] for i in dense]))
        reduced = collectives.allreduce(wires, how, name, ignore_name_scope, parts)
        for index, result in zip(dense, decompress(compression, reduced, contexts), strict=True):
            results[index] = result
    return results


@speaks_tensorflow
@explained_like(comm.allgather)
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Concatenate every rank's tensor along the first dimension, in rank order; differentiable.

    Returns:
        A new tensor.

    Blocks until all ranks called; in a graph, delays only operations that need the result.
    """
    return collectives.allgather(_tensors([tensor]), process_set, name, ignore_name_scope)[0]


@speaks_tensorflow
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gather several tensors in one operation; differentiable. See ``allgather``.

    Returns:
        New tensors, in the order of ``tensors``.
    """
    return collectives.allgather(_tensors(_listed(tensors)), process_set, name, ignore_name_scope)


@speaks_tensorflow
@explained_like(comm.broadcast)
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's tensor on every rank; differentiable.

    Returns:
        A new tensor.

    Blocks until the data has arrived; in a graph, delays only operations that need the result.
    """
    return collectives.broadcast(_tensors([tensor])[0], root_rank, process_set, name, ignore_name_scope)


@speaks_tensorflow
def broadcast_(
    variables: Sequence[tf.Variable],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Set variables to the root's values.

    Args:
        variables: same shapes and dtypes, in the same order, on every rank.
        root_rank: global rank of the sender.
        name: key of the match; each variable's number is appended.
        process_set: ranks that take part; this rank must be one of them.

    Returns:
        The new values.

    Raises:
        ValueError: an element of ``variables`` is not a variable.
        MismatchError: shapes, dtypes or roots disagree; on every rank.
        PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.

    Blocks until the data has arrived; in a graph, delays only operations that need the result.
    """
    for variable in variables:
        if not isinstance(variable, tf.Variable):
            raise ValueError(f"broadcast_ takes variables. Received: {type(variable).__name__}; use broadcast() for it")
    values = []
    for index, variable in enumerate(variables):
        key = f"{name}_{index + 1}of{len(variables)}" if name else None
        value = broadcast(variable.read_value(), root_rank, key, process_set=process_set)
        values.append(variable.assign(value))
    return values


@speaks_tensorflow
@explained_like(comm.alltoall)
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a part of the tensor to every rank, and receive a part from each; differentiable.

    Returns:
        The received rows, in rank order; with ``splits`` also the number of rows that each rank sent.

    Blocks until all ranks called; in a graph, delays only operations that need the result.
    """
    output, received = collectives.alltoall(_tensors([tensor])[0], splits, process_set, name, ignore_name_scope)
    return output if splits is None else (output, received)


@speaks_tensorflow
@explained_like(comm.reducescatter)
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Combine a tensor over all ranks and keep this rank's rows; differentiable for Sum and Average.

    Returns:
        This rank's rows, a new tensor.

    Blocks until all ranks called; in a graph, delays only operations that need the result.
    """
    how = Reduction(resolve_op(op, None), prescale_factor, postscale_factor, process_set)
    return _reducescatter([tensor], compression, how, name, ignore_name_scope)[0]


@speaks_tensorflow
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    ignore_name_scope: bool = False,
) -> Any:
    """Combine several tensors over all ranks and keep this rank's rows of each. See ``reducescatter``.

    Returns:
        This rank's rows of each, in the order of ``tensors``.
    """
    if not _listed(tensors):
        return tensors
    how = Reduction(resolve_op(op, None), prescale_factor, postscale_factor, process_set)
    return _reducescatter(tensors, compression, how, name, ignore_name_scope)


def _reducescatter(
    tensors: Sequence[Any], compression: type[Compressor], how: Reduction, name: str | None, ignore_name_scope: bool
) -> list[Any]:
    wires, contexts = compress(compression, _tensors(tensors))
    return decompress(compression, collectives.reducescatter(wires, how, name, ignore_name_scope), contexts)


@speaks_tensorflow
def join() -> Any:
    """Take no part in later operations of the other ranks; return when all ranks have joined.

    In a graph, it runs after the collectives created before it.

    Returns:
        The rank that joined last, as an int32 tensor.

    Raises:
        PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.

    Blocks until all ranks have joined.
    """
    if tf.executing_eagerly():
        return tf.constant(comm.join(), tf.int32)
    return collectives.after_all(Kind.JOIN, global_process_set, [tf.int32])


@speaks_tensorflow
def barrier(process_set: ProcessSet = global_process_set) -> Any:
    """Block until every rank has called; in a graph of TensorFlow 1, return an operation that does this.

    Args:
        process_set: ranks that take part; this rank must be one of them.

    Raises:
        PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.
    """
    if tf.executing_eagerly():
        return comm.barrier(process_set)
    made = collectives.after_all(Kind.BARRIER, process_set, [])
    return None if tf.compat.v1.get_default_graph().building_function else made
