"""The collectives of a training script, on arrays and on pytrees; eagerly, and in whatever JAX transforms."""

from __future__ import annotations

from typing import Any

from horovod.bindings.compression import Compression, Compressor, compress, decompress
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.bindings.reductions import resolve_op
from horovod.core.requests import Kind, ReduceOp
from horovod.errors import RequestError
from horovod.jax.placing import carry_out, carry_out_splits, make_call, refuse_in_programs
from horovod.jax.runtime import comm
from horovod.jax.trees import Leaves

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]


def allreduce(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    compression: type[Compressor] = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Combine an array, or all arrays of a pytree, over all ranks, element by element.

    Collective over ``process_set``; works eagerly and under ``jit``, ``grad``, ``vmap``, ``scan`` and so on. A pytree
    is one operation, and has the same structure on every rank.

    Args:
        tensor: same shape and dtype on every rank; is not changed. Python's and numpy's numbers become arrays; leaves
            that are no numbers come back as they are.
        name: key of the match; ``None`` matches eager calls in their order, and calls in a program by program and line.
        op: Average (the default), Sum, Min, Max, Product or Adasum.
        compression: how to send it, such as ``Compression.fp16``.
        prescale_factor: multiplies the tensor before it is combined.
        postscale_factor: multiplies the result.
        process_set: ranks that take part; this rank must be one of them.

    Returns:
        A new array, or pytree of arrays, of the same shapes and dtypes.

    Raises:
        MismatchError: shapes, dtypes or arguments disagree; on every rank, with each rank's value.
        PeerLostError: a rank died.
        RequestError: the call is wrong by itself.
        NotInitializedError: ``init()`` was not called.

    Blocks until all ranks called; inside a program, when that is executed. What fails there reaches the caller as a
    ``JaxRuntimeError``, see ``typed_errors``.
    """
    how = resolve_op(op, None)
    leaves = Leaves(tensor)
    leaves.refuse_keys("allreduce")
    wires, contexts = compress(compression, leaves.arrays)
    call = make_call(Kind.ALLREDUCE, name, process_set, op=how, prescale=prescale_factor, postscale=postscale_factor)
    return leaves.rebuild(decompress(compression, carry_out(call, wires), contexts))


def grouped_allreduce(
    tensors: Any,
    name: str | None = None,
    op: int | None = None,
    compression: type[Compressor] = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Combine all arrays of a list or another pytree as one operation; the same as ``allreduce``.

    Args:
        tensors: a pytree; see ``allreduce`` for this and the other arguments.
        name: key of the match.
        op: Average (the default), Sum, Min, Max, Product or Adasum.
        compression: how to send it.
        prescale_factor: multiplies the tensors before they are combined.
        postscale_factor: multiplies the results.
        process_set: ranks that take part.

    Returns:
        A pytree of the same structure.
    """
    return allreduce(tensors, name, op, compression, prescale_factor, postscale_factor, process_set)


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate every rank's array, or every array of a pytree, along the first dimension, in rank order.

    Args:
        tensor: at least one dimension. The first may differ between ranks and may be 0; inside a program, whose shapes
            are fixed, it is the same on all ranks.
        name: key of the match; see ``allreduce``.
        process_set: ranks that take part; this rank must be one of them.

    Returns:
        A new array, or pytree of arrays.

    Raises:
        MismatchError: dtypes, or dimensions behind the first, disagree; inside a program also numbers of rows.
        PeerLostError: a rank died.
        RequestError: the call is wrong by itself.
        NotInitializedError: ``init()`` was not called.

    Blocks until all ranks called.
    """
    leaves = Leaves(tensor)
    leaves.refuse_keys("allgather")
    return leaves.rebuild(carry_out(make_call(Kind.ALLGATHER, name, process_set), leaves.arrays))


def grouped_allgather(tensors: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate all arrays of a list or another pytree as one operation; the same as ``allgather``.

    Args:
        tensors: a pytree.
        name: key of the match.
        process_set: ranks that take part.

    Returns:
        A pytree of the same structure.
    """
    return allgather(tensors, name, process_set)


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's array, or pytree of arrays.

    Args:
        tensor: same structure, shapes and dtypes on every rank; is not changed.
        root_rank: whose values to return; a global rank also within a process set.
        name: key of the match; see ``allreduce``. The arrays of a pytree are numbered.
        process_set: ranks that take part; this rank must be one of them.

    Returns:
        A new array, or pytree; leaves that are no numbers are this rank's own.

    Raises:
        MismatchError: shapes, dtypes or roots disagree; on every rank, with each rank's value.
        PeerLostError: a rank died.
        RequestError: the call is wrong by itself.
        NotInitializedError: ``init()`` was not called.

    Blocks until all ranks called.
    """
    leaves = Leaves(tensor)
    return leaves.rebuild(carry_out(make_call(Kind.BROADCAST, name, process_set, root=root_rank), leaves.arrays))


def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send the i-th split of the rows to the i-th rank.

    Args:
        tensor: rows, or a pytree of arrays of rows; the dimensions behind the first agree on all ranks.
        splits: how many rows go to each rank; ``None`` means the same number to all. Not inside a program, whose
            shapes are fixed.
        name: key of the match; see ``allreduce``.
        process_set: ranks that take part; this rank must be one of them.

    Returns:
        The received rows in rank order; with ``splits`` also how many came from each rank.

    Raises:
        MismatchError: dtypes, or dimensions behind the first, disagree; on every rank, with each rank's value.
        PeerLostError: a rank died.
        RequestError: the call is wrong by itself.
        ValueError: the splits are.
        NotInitializedError: ``init()`` was not called.

    Blocks until all ranks called.
    """
    leaves = Leaves(tensor)
    leaves.refuse_keys("alltoall")
    call = make_call(Kind.ALLTOALL, name, process_set)
    if splits is None:
        return leaves.rebuild(carry_out(call, leaves.arrays))
    results, received = carry_out_splits(call, leaves.arrays, splits)
    return leaves.rebuild(results), received


def reducescatter(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Combine an array, or all arrays of a pytree, over all ranks and return this rank's rows of the result.

    Args:
        tensor: same shape and dtype on every rank; of an uneven number of rows the first ranks get one more.
        name: key of the match; see ``allreduce``.
        op: Average (the default), Sum, Min, Max or Product.
        prescale_factor: multiplies the tensor before it is combined.
        postscale_factor: multiplies the result.
        process_set: ranks that take part; this rank must be one of them.

    Returns:
        A new array, or pytree of arrays.

    Raises:
        MismatchError: shapes, dtypes or arguments disagree; on every rank, with each rank's value.
        PeerLostError: a rank died.
        RequestError: the call is wrong by itself.
        NotInitializedError: ``init()`` was not called.

    Blocks until all ranks called.
    """
    how = resolve_op(op, None)
    if how is ReduceOp.ADASUM:
        raise RequestError("reducescatter takes Average, Sum, Min, Max or Product, received Adasum")
    leaves = Leaves(tensor)
    leaves.refuse_keys("reducescatter")
    call = make_call(
        Kind.REDUCESCATTER, name, process_set, op=how, prescale=prescale_factor, postscale=postscale_factor
    )
    return leaves.rebuild(carry_out(call, leaves.arrays))


def grouped_reducescatter(
    tensors: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Combine and scatter all arrays of a list or another pytree as one operation; the same as ``reducescatter``.

    Args:
        tensors: a pytree.
        name: key of the match.
        op: Average (the default), Sum, Min, Max or Product.
        prescale_factor: multiplies the tensors before they are combined.
        postscale_factor: multiplies the results.
        process_set: ranks that take part.

    Returns:
        A pytree of the same structure.
    """
    return reducescatter(tensors, name, op, prescale_factor, postscale_factor, process_set)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called.

    Args:
        process_set: ranks that take part; this rank must be one of them.

    Raises:
        RequestError: it is called inside a program: there it would have no result that anything waits for.
        PeerLostError: a rank died.
        NotInitializedError: ``init()`` was not called.
    """
    refuse_in_programs("barrier", "call it before or after the program; every collective in it waits for all ranks")
    comm.barrier(process_set)


def join(device: int = -1) -> int:
    """Take no part in what the others still do; return when all ranks have joined.

    Args:
        device: accepted for Horovod's sake.

    Returns:
        The rank that joined last.

    Raises:
        RequestError: it is called inside a program.
        PeerLostError: a rank died.
        NotInitializedError: ``init()`` was not called.
    """
    refuse_in_programs("join", "call it when this rank has no more batches to run the program on")
    return comm.join(device)
