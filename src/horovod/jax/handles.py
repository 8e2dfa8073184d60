"""Collectives that are begun and waited for later; eagerly only, since XLA decides by itself what runs beside what."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.bindings.reductions import resolve_op
from horovod.jax.calls import numbered, place
from horovod.jax.placing import refuse_in_programs
from horovod.jax.runtime import comm
from horovod.jax.trees import Leaves

__all__ = [
    "allgather_async",
    "allreduce_async",
    "alltoall_async",
    "broadcast_async",
    "grouped_allgather_async",
    "grouped_allreduce_async",
    "grouped_reducescatter_async",
    "poll",
    "reducescatter_async",
    "synchronize",
]

_INSTEAD = "use the operation without _async there: XLA computes other things meanwhile by itself"


class _Pending(NamedTuple):
    """What was begun.

    Attributes:
        handles: of the collectives.
        leaves: what was given.
        is_group: whether one handle stands for all arrays.
        has_splits: whether the caller gets received splits too.
    """

    handles: Sequence[int]
    leaves: Leaves
    is_group: bool
    has_splits: bool = False


_pending: dict[int, _Pending] = {}
_numbers = itertools.count(1)


def _keep(pending: _Pending) -> int:
    number = next(_numbers)
    _pending[number] = pending
    return number


def _begin_group(verb: str, begin: Callable[..., int], tensor: Any, *args: Any, **how: Any) -> int:
    refuse_in_programs(f"{verb}_async", _INSTEAD)
    leaves = Leaves(tensor)
    leaves.refuse_keys(verb)
    if not leaves.arrays:
        return _keep(_Pending((), leaves, True))
    return _keep(_Pending((begin(leaves.arrays, *args, **how),), leaves, True))


def allreduce_async(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin an allreduce of an array or a pytree; ``synchronize`` returns the result. See ``allreduce``.

    Args:
        tensor: an array or a pytree.
        name: key of the match.
        op: Average (the default), Sum, Min, Max, Product or Adasum.
        prescale_factor: multiplies the tensor before it is combined.
        postscale_factor: multiplies the result.
        process_set: ranks that take part.

    Returns:
        A handle for ``poll`` and ``synchronize``.

    Raises:
        RequestError: the call is wrong by itself, or inside a program.
        NotInitializedError: ``init()`` was not called.
    """
    how = {
        "op": resolve_op(op, None), "prescale_factor": prescale_factor, "postscale_factor": postscale_factor,
        "process_set": process_set,
    }  # fmt: skip
    return _begin_group("allreduce", comm.grouped_allreduce_async, tensor, name=name, **how)


def grouped_allreduce_async(
    tensors: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin an allreduce of a list or another pytree as one operation; the same as ``allreduce_async``.

    Args:
        tensors: a pytree.
        name: key of the match.
        op: Average (the default), Sum, Min, Max, Product or Adasum.
        prescale_factor: multiplies the tensors before they are combined.
        postscale_factor: multiplies the results.
        process_set: ranks that take part.

    Returns:
        A handle for ``poll`` and ``synchronize``.
    """
    return allreduce_async(tensors, name, op, prescale_factor, postscale_factor, process_set)


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin a reducescatter of an array or a pytree; ``synchronize`` returns the result. See ``reducescatter``.

    Args:
        tensor: an array or a pytree.
        name: key of the match.
        op: Average (the default), Sum, Min, Max or Product.
        prescale_factor: multiplies the tensor before it is combined.
        postscale_factor: multiplies the result.
        process_set: ranks that take part.

    Returns:
        A handle for ``poll`` and ``synchronize``.

    Raises:
        RequestError: the call is wrong by itself, or inside a program.
        NotInitializedError: ``init()`` was not called.
    """
    how = {
        "op": resolve_op(op, None), "prescale_factor": prescale_factor, "postscale_factor": postscale_factor,
        "process_set": process_set,
    }  # fmt: skip
    return _begin_group("reducescatter", comm.grouped_reducescatter_async, tensor, name=name, **how)


def grouped_reducescatter_async(
    tensors: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin a reducescatter of a list or another pytree; the same as ``reducescatter_async``.

    Args:
        tensors: a pytree.
        name: key of the match.
        op: Average (the default), Sum, Min, Max or Product.
        prescale_factor: multiplies the tensors before they are combined.
        postscale_factor: multiplies the results.
        process_set: ranks that take part.

    Returns:
        A handle for ``poll`` and ``synchronize``.
    """
    return reducescatter_async(tensors, name, op, prescale_factor, postscale_factor, process_set)


def allgather_async(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin an allgather of an array or a pytree; ``synchronize`` returns the result. See ``allgather``.

    Args:
        tensor: an array or a pytree.
        name: key of the match.
        process_set: ranks that take part.

    Returns:
        A handle for ``poll`` and ``synchronize``.

    Raises:
        RequestError: the call is wrong by itself, or inside a program.
        NotInitializedError: ``init()`` was not called.
    """
    return _begin_group("allgather", comm.grouped_allgather_async, tensor, name, process_set)


def grouped_allgather_async(tensors: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin an allgather of a list or another pytree; the same as ``allgather_async``.

    Args:
        tensors: a pytree.
        name: key of the match.
        process_set: ranks that take part.

    Returns:
        A handle for ``poll`` and ``synchronize``.
    """
    return allgather_async(tensors, name, process_set)


def broadcast_async(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin a broadcast of an array or a pytree; ``synchronize`` returns the result. See ``broadcast``.

    Args:
        tensor: an array or a pytree.
        root_rank: global rank whose values to return.
        name: key of the match.
        process_set: ranks that take part.

    Returns:
        A handle for ``poll`` and ``synchronize``.

    Raises:
        RequestError: the call is wrong by itself, or inside a program.
        NotInitializedError: ``init()`` was not called.
    """
    refuse_in_programs("broadcast_async", _INSTEAD)
    leaves = Leaves(tensor)
    names = numbered(name, len(leaves.arrays))
    handles = [
        comm.broadcast_async(array, root_rank, key, process_set)
        for key, array in zip(names, leaves.arrays, strict=True)
    ]
    return _keep(_Pending(handles, leaves, False))


def alltoall_async(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin an alltoall of an array or a pytree; ``synchronize`` returns (output, received splits). See ``alltoall``.

    Args:
        tensor: an array or a pytree.
        splits: how many rows go to each rank; ``None`` means the same number to all.
        name: key of the match.
        process_set: ranks that take part.

    Returns:
        A handle for ``poll`` and ``synchronize``.

    Raises:
        RequestError: the call is wrong by itself, or inside a program.
        ValueError: the splits are.
        NotInitializedError: ``init()`` was not called.
    """
    refuse_in_programs("alltoall_async", _INSTEAD)
    leaves = Leaves(tensor)
    leaves.refuse_keys("alltoall")
    names = numbered(name, len(leaves.arrays))
    handles = [
        comm.alltoall_async(array, splits, key, process_set) for key, array in zip(names, leaves.arrays, strict=True)
    ]
    return _keep(_Pending(handles, leaves, False, True))


def poll(handle: int) -> bool:
    """Return whether an operation is done, so that ``synchronize`` will not block.

    Args:
        handle: of an ``_async`` call that was not synchronized yet.

    Raises:
        ValueError: there is no such handle.
    """
    pending = _pending.get(handle)
    if pending is None:
        raise ValueError(f"handle {handle} was not created, or its operation was synchronized already")
    return all(comm.poll(inner) for inner in pending.handles)


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result.

    Args:
        handle: of an ``_async`` call; an unknown one returns None at once, as in Horovod.

    Returns:
        An array or pytree as was given; of an alltoall also how many rows came from each rank.

    Raises:
        HorovodInternalError: what went wrong.

    Blocks until all ranks called.
    """
    pending = _pending.pop(handle, None)
    if pending is None:
        return None
    found = [comm.synchronize(inner) for inner in pending.handles]
    received = None
    if pending.has_splits:
        found, received = [output for output, _ in found], found[0][1]
    results = [result for group in found for result in group] if pending.is_group else found
    placed = [place(result, array) for result, array in zip(results, pending.leaves.arrays, strict=True)]
    tree = pending.leaves.rebuild(placed)
    return (tree, received) if pending.has_splits else tree
