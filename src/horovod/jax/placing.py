"""Run a collective now, or make it part of the program that JAX traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from horovod import context
from horovod.bindings.collectives import check_root
from horovod.bindings.misuse import wrong_argument
from horovod.bindings.process_sets import ProcessSet
from horovod.bindings.reductions import check_factors
from horovod.bindings.runtime import comm as numpy_comm
from horovod.bindings.sites import user_site
from horovod.bindings.submission import id_of
from horovod.core.collectives import keeps_shape
from horovod.core.requests import Kind, Request, TensorSpec
from horovod.jax.calls import CollectiveCall, finish, run_eagerly, split_watched, start_eagerly
from horovod.jax.primitives import collective
from horovod.jax.runtime import is_compiling, is_tracing

__all__ = ["carry_out", "carry_out_splits", "make_call", "outside_programs", "refuse_in_programs", "with_splits"]

P = ParamSpec("P")
R = TypeVar("R")


def make_call(kind: Kind, name: str | None, process_set: ProcessSet, **how: Any) -> CollectiveCall:
    """Return the description of the user's call of a collective."""
    if isinstance(root := how.get("root"), jax.core.Tracer):
        raise wrong_argument(
            "root_rank must be known when JAX traces; where it is an argument of a program, name it in jax.jit's "
            f"static_argnames. Received: {root}"
        )
    if root is not None:
        how["root"] = check_root(root)
    if "prescale" in how:
        how["prescale"], how["postscale"] = check_factors(how["prescale"], how["postscale"])
    if not is_tracing():
        return CollectiveCall(kind, name, process_set=process_set, **how)
    rank = context.world().rank
    if process_set.included() is False:
        raise wrong_argument(f"{kind.name.lower()} on {process_set}, of which rank {rank} is not a member")
    id_of(process_set)
    # Programs of the other collectives do not depend on the number of ranks: a membership change keeps them valid.
    if not keeps_shape(kind):
        how |= {"size": process_set.size(), "place": process_set.rank()}
    return CollectiveCall(kind, name, user_site(), process_set=process_set, **how)


def carry_out(call: CollectiveCall, arrays: Sequence[Any]) -> list[Any]:
    """Run a call now, or make it part of the program that JAX traces; return one result for each array.

    Raises:
        RequestError: an argument is invalid, while JAX traces; otherwise the engine checks.
    """
    if not arrays:
        return []
    if not is_tracing():
        return run_eagerly(call, arrays)
    _check(call, split_watched(call, arrays)[0])
    if call.kind in (Kind.ALLGATHER, Kind.REDUCESCATTER) and not is_compiling():
        call = _among_present(call, arrays)
    return collective(call, arrays)


def _check(call: CollectiveCall, arrays: Sequence[Any]) -> None:
    """Refuse an invalid call while tracing; otherwise every execution of the program would fail."""
    number, check = id_of(call.process_set), context.engine().check
    for array in arrays:
        spec = TensorSpec(array.dtype.name, tuple(array.shape))
        request = Request(call.name or "", call.kind, number, (spec,), call.op, root=call.root, splits=call.splits)
        if error := check(request):
            raise wrong_argument(error)


def _among_present(call: CollectiveCall, arrays: Sequence[Any]) -> CollectiveCall:
    """Exchange what shapes and derivatives depend on: which members have not joined, and their numbers of rows."""
    own = np.array([[call.place, *(array.shape[0] for array in arrays)]])
    table = numpy_comm.allgather(own, name=call.name and f"{call.name}.rows", process_set=call.process_set)
    places, *rows = (tuple(column) for column in table.T.tolist())
    return replace(
        call, size=len(places), place=places.index(call.place),
        rows=tuple(rows) if call.kind is Kind.ALLGATHER else None,
    )  # fmt: skip


def carry_out_splits(call: CollectiveCall, arrays: Sequence[Any], splits: Any) -> tuple[list[Any], Any]:
    """Run an alltoall with splits, or make it part of what JAX differentiates. Return one result for each array, and
    the number of rows from each member.
    """
    if is_compiling():
        raise wrong_argument(
            "alltoall takes no splits inside a program, whose shapes are fixed when JAX traces; leave splits out and "
            "pad the rows, or call it outside of jit"
        )
    call = with_splits(call, splits)
    numbers = call.splits
    if not is_tracing():
        return finish(start_eagerly(call, arrays))
    _check(call, arrays)  # before the exchange of splits with other ranks
    name = call.name and f"{call.name}.splits"
    own = np.array(numbers, np.int32)
    received = numpy_comm.alltoall(own, name=name, process_set=call.process_set)
    rows = (tuple(received.tolist()),) * len(arrays)
    return carry_out(replace(call, rows=rows), arrays), received


def with_splits(call: CollectiveCall, splits: Any) -> CollectiveCall:
    """Return an alltoall with splits; with even splits if ``splits`` is None.

    Raises:
        ValueError: ``splits`` holds no integers, or is empty.
    """
    if splits is None:
        return call
    if not (numbers := numpy_comm.adapter.splits(splits)):
        raise ValueError("splits must hold a number for each rank, or be None for even ones. Received: an empty one")
    return replace(call, splits=numbers)


def refuse_in_programs(verb: str, instead: str) -> None:
    """Refuse a function inside a program, where it would run only once, during tracing.

    Raises:
        RequestError: JAX is compiling the calling function.
    """
    if is_compiling():
        raise wrong_argument(
            f"hvd.{verb}() inside a program that JAX compiles would run once, while it traces; {instead}"
        )


def outside_programs(function: Callable[P, R], instead: str) -> Callable[P, R]:
    """Return a function that refuses to be called inside a program; see ``refuse_in_programs``."""

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_in_programs(function.__name__, instead)
        return function(*args, **kwargs)

    return guarded
