"""The collectives of a training script, on arrays and on pytrees; eagerly, and under all of JAX's transformations.

One function describes each collective. Its forms are derived from it: blocking, asynchronous (only eagerly, because
XLA schedules programs by itself), and Horovod's grouped forms, which do the same because a pytree is a group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec

from horovod.bindings.compression import Compression, Compressor, compress, decompress
from horovod.bindings.docstrings import explained_like
from horovod.bindings.misuse import find_open
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.bindings.reductions import refuse_adasum, resolve_op
from horovod.bindings.variants import derive
from horovod.core.requests import Kind
from horovod.jax.calls import CollectiveCall, Started, finish, start_eagerly
from horovod.jax.placing import (
    carry_out,
    carry_out_splits,
    make_call,
    outside_programs,
    refuse_in_programs,
    with_splits,
)
from horovod.jax.runtime import comm
from horovod.jax.trees import Leaves

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]

P = ParamSpec("P")

_TENSOR = (
    "same structure, shapes and dtypes on every rank; is not changed. Python's and numpy's numbers become arrays; "
    "leaves that are not numbers come back as they are."
)
_NAME = "key of the match; ``None`` matches eager calls in their order, and calls in a program by program and line."


class TreeCall(NamedTuple):
    """A collective on a pytree."""

    call: CollectiveCall
    leaves: Leaves  # the pytree
    compression: type[Compressor] = Compression.none  # compressor of the sent arrays
    splits: Any = None  # the user's splits of an alltoall


_numbers = itertools.count(1)
#: The call, the operations and the contexts of the compressor, by handle.
_started: dict[int, tuple[TreeCall, Started, list[Any]]] = {}


@explained_like(comm.allreduce, tensor=_TENSOR, name=_NAME)
def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    compression: type[Compressor] = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> TreeCall:
    """Combine an array, or all arrays of a pytree, over all ranks, element by element.

    Collective over ``process_set``; works eagerly and under ``jit``, ``grad``, ``vmap``, ``scan`` and so on. A pytree
    is one operation, and has the same structure on every rank.

    Returns:
        A new array, or pytree of arrays, of the same shapes and dtypes.

    Blocks until all ranks called; inside a program, during its execution. An error there reaches the caller as a
    ``JaxRuntimeError``, see ``typed_errors``.
    """
    how, leaves = resolve_op(op, None), Leaves(tensor, verb="allreduce")
    factors = {"prescale": prescale_factor, "postscale": postscale_factor}
    call = make_call(Kind.ALLREDUCE, name, process_set, op=how, parts=leaves.parts, **factors)
    return TreeCall(call, leaves, compression)


@explained_like(
    comm.allgather,
    tensor="at least one dimension. The first may differ between ranks and may be 0; inside a program, whose "
    "shapes are fixed, it is the same on all ranks.",
    name=_NAME,
)
def _allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> TreeCall:
    """Concatenate every rank's array, or every array of a pytree, along the first dimension, in rank order.

    Returns:
        A new array, or pytree of arrays.
    """
    leaves = Leaves(tensor, verb="allgather")
    return TreeCall(make_call(Kind.ALLGATHER, name, process_set, parts=leaves.parts), leaves)


@explained_like(comm.broadcast, tensor=_TENSOR, name=f"{_NAME} The arrays of a pytree are numbered.")
def _broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> TreeCall:
    """Return the root's array, or pytree of arrays.

    Returns:
        A new array, or pytree; leaves that are not numbers stay local.
    """
    leaves = Leaves(tensor)
    return TreeCall(make_call(Kind.BROADCAST, name, process_set, root=root_rank, parts=leaves.parts), leaves)


@explained_like(
    comm.alltoall,
    tensor="rows, or a pytree of arrays of rows; the dimensions after the first agree on all ranks.",
    splits="how many rows go to each rank; ``None`` means the same number to all. Not inside a program, whose "
    "shapes are fixed.",
    name=_NAME,
)
def _alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> TreeCall:
    """Send the i-th split of the rows to the i-th rank.

    Returns:
        The received rows in rank order; with ``splits`` also the number of rows from each rank.
    """
    leaves = Leaves(tensor, verb="alltoall")
    return TreeCall(make_call(Kind.ALLTOALL, name, process_set, parts=leaves.parts), leaves, splits=splits)


@explained_like(comm.reducescatter, name=_NAME)
def _reducescatter(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> TreeCall:
    """Combine an array, or all arrays of a pytree, over all ranks and return this rank's rows of the result.

    Returns:
        A new array, or pytree of arrays.
    """
    how, leaves = refuse_adasum(resolve_op(op, None)), Leaves(tensor, verb="reducescatter")
    factors = {"prescale": prescale_factor, "postscale": postscale_factor}
    call = make_call(Kind.REDUCESCATTER, name, process_set, op=how, parts=leaves.parts, **factors)
    return TreeCall(call, leaves)


def _blocking(describe: Callable[P, TreeCall]) -> Callable[P, Any]:
    """Return the blocking function; while JAX traces, it makes the call part of the program."""

    def run(*args: P.args, **kwargs: P.kwargs) -> Any:
        tree_call = describe(*args, **kwargs)
        wires, contexts = compress(tree_call.compression, tree_call.leaves.arrays)
        if tree_call.splits is None:
            return _rebuild(tree_call, carry_out(tree_call.call, wires), contexts)
        results, received = carry_out_splits(tree_call.call, wires, tree_call.splits)
        return _rebuild(tree_call, results, contexts), received

    return derive(run, describe)


def _starting(describe: Callable[P, TreeCall]) -> Callable[P, int]:
    """Return the asynchronous function, which returns a handle for ``synchronize``."""

    def start(*args: P.args, **kwargs: P.kwargs) -> int:
        refuse_in_programs(
            f"{describe.__name__[1:]}_async",
            "use the operation without _async there: XLA computes other things meanwhile",
        )
        tree_call = describe(*args, **kwargs)
        wires, contexts = compress(tree_call.compression, tree_call.leaves.arrays)
        started = start_eagerly(with_splits(tree_call.call, tree_call.splits), wires)
        number = next(_numbers)
        _started[number] = tree_call, started, contexts
        return number

    return derive(start, describe, begins=True)


def _grouped(
    describe: Callable[Concatenate[Any, P], TreeCall],
) -> tuple[Callable[Concatenate[Any, P], Any], Callable[Concatenate[Any, P], int]]:
    """Return Horovod's grouped forms, blocking and asynchronous."""
    run, start = _blocking(describe), _starting(describe)
    return derive(run, describe, is_grouped=True), derive(start, describe, begins=True, is_grouped=True)


allreduce, allreduce_async = _blocking(_allreduce), _starting(_allreduce)
grouped_allreduce, grouped_allreduce_async = _grouped(_allreduce)
allgather, allgather_async = _blocking(_allgather), _starting(_allgather)
grouped_allgather, grouped_allgather_async = _grouped(_allgather)
broadcast, broadcast_async = _blocking(_broadcast), _starting(_broadcast)
alltoall, alltoall_async = _blocking(_alltoall), _starting(_alltoall)
reducescatter, reducescatter_async = _blocking(_reducescatter), _starting(_reducescatter)
grouped_reducescatter, grouped_reducescatter_async = _grouped(_reducescatter)
barrier = outside_programs(
    comm.barrier, "call it before or after the program; every collective in it waits for all ranks"
)
join = outside_programs(comm.join, "call it when this rank has no more batches to run the program on")


def _rebuild(tree_call: TreeCall, results: Sequence[Any], contexts: Sequence[Any]) -> Any:
    return tree_call.leaves.rebuild(decompress(tree_call.compression, results, contexts))


@explained_like(comm.poll)
def poll(handle: int) -> bool:
    """Return whether an operation is done, so that ``synchronize`` will not block."""
    found = find_open(_started, handle)
    if found is None:
        raise ValueError(f"handle {handle} was not created, or its operation was synchronized already")
    return all(comm.poll(inner) for inner in found[1].handles)


@explained_like(comm.synchronize)
def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result.

    Returns:
        An array or pytree like the input; for an alltoall also the number of rows from each rank.
    """
    if find_open(_started, handle) is None or (found := _started.pop(handle, None)) is None:
        return None
    tree_call, started, contexts = found
    results, received = finish(started)
    tree = _rebuild(tree_call, results, contexts)
    return (tree, received) if tree_call.call.kind is Kind.ALLTOALL else tree
