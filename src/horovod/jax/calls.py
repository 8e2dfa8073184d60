"""One collective: its description, and its execution.

Eagerly it uses the same collectives as every framework. Inside a compiled program it works on XLA's memory of its
operands and results, and does not call JAX, because a rank may have only one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from horovod import context
from horovod.bindings.fingerprints import compare_once
from horovod.bindings.numpy_adapter import NumpyAdapter
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.bindings.sites import Site
from horovod.bindings.submission import id_of
from horovod.core.collectives import COLLECTIVES, keeps_shape
from horovod.core.requests import Kind, ReduceOp
from horovod.engine import calls as engine_calls
from horovod.errors import HorovodInternalError, MismatchError
from horovod.jax.runtime import comm

__all__ = [
    "CollectiveCall",
    "Rows",
    "Started",
    "finish",
    "place",
    "run_eagerly",
    "run_in_program",
    "split_watched",
    "start_eagerly",
]

Array = np.ndarray[Any, np.dtype[Any]]
#: Number of rows that each member sends or receives: one tuple per array.
Rows = tuple[tuple[int, ...], ...]

_TANGENT = ".tangent"
_NOWHERE = Site()


@dataclass(frozen=True)
class CollectiveCall:
    """Description of a collective without its arrays; static, so that a compiled program can hold it."""

    kind: Kind
    name: str | None = None  # the user's name, or None
    site: Site = _NOWHERE  # the user's line; replaces a missing name inside programs
    suffix: str = ""  # suffix of the name that distinguishes a derivative from the call itself
    op: ReduceOp = ReduceOp.SUM  # operation of a reduction
    prescale: float = 1.0  # factor before a reduction
    postscale: float = 1.0  # factor after a reduction
    root: int = 0  # root rank of a broadcast
    only_root: int = -1  # the only rank that gets the result of an allreduce, others get zeros; -1 for all
    splits: tuple[int, ...] = ()  # rows for each member in an alltoall; empty for even splits
    parts: str = ""  # paths of the leaves of the user's pytree; compared between the ranks
    # rows from each member in an allgather or alltoall; None if only execution determines them
    rows: Rows | None = None
    process_set: ProcessSet = global_process_set  # the member ranks
    # number of members, or outside of programs of those that have not joined, if JAX traces what depends on it
    size: int = 1
    place: int = 0  # this rank's index among them, if JAX traces what depends on it
    # names of the last arrays: parameters that are only compared once between ranks, not sent
    watched: tuple[str, ...] = ()
    remedy: str = "hvd.broadcast_parameters(params, root_rank=0)"  # the call to recommend if the parameters differ

    @property
    def verb(self) -> str:
        """Name of the operation in error messages."""
        return self.kind.name.lower()

    def tangent(self, **changes: Any) -> CollectiveCall:
        """Return the call that applies this operation to tangents."""
        return replace(self, suffix=self.suffix + _TANGENT, watched=(), **changes)

    def gradient(self, **changes: Any) -> CollectiveCall:
        """Return the call that computes the gradients of this one's inputs."""
        return replace(self, suffix=self.suffix.removesuffix(_TANGENT) + ".gradient", **changes)

    def eager_name(self) -> str | None:
        """Return the key of the match outside programs; None without a name."""
        return self.name and f"{self.name}{self.suffix}"


# -- eagerly -----------------------------------------------------------------------------------------------------


class Started(NamedTuple):
    """A call that was started eagerly."""

    call: CollectiveCall
    handles: Sequence[int]  # one per array, or one for all arrays
    arrays: Sequence[Any]  # the JAX arrays to send


def start_eagerly(call: CollectiveCall, arrays: Sequence[Any]) -> Started:
    """Start a call eagerly.

    Raises:
        HorovodInternalError: an argument is invalid, or the comparison of parameters failed.
    """
    name = call.eager_name()
    arrays, parameters = split_watched(call, arrays)
    _compare(call, name or "", parameters)
    if not arrays:
        return Started(call, (), ())
    if COLLECTIVES[call.kind].has_groups:
        return Started(call, (comm._start(_described(call, name), arrays, many=True),), arrays)
    pairs = zip(arrays, numbered(name, len(arrays)), strict=True)
    return Started(call, [comm._start(_described(call, key), (array,)) for array, key in pairs], arrays)


def finish(started: Started) -> tuple[list[Any], Any]:
    """Wait for a call. Return JAX arrays on the devices of the inputs; and the received splits of an alltoall, else
    None.

    Raises:
        HorovodInternalError: the call failed.

    Blocks until all members called.
    """
    call, received = started.call, None
    found = [comm.synchronize(handle) for handle in started.handles]
    if COLLECTIVES[call.kind].has_groups:
        found = list(found[0]) if found else []
    elif call.kind is Kind.ALLTOALL and found:
        received = found[0][1]
        found = [rows for rows, _ in found]
    if call.only_root not in (-1, context.world().rank):
        found = [comm.adapter.wrap(np.zeros_like(np.asarray(result))) for result in found]
    return [place(result, array) for result, array in zip(found, started.arrays, strict=True)], received


def run_eagerly(call: CollectiveCall, arrays: Sequence[Any]) -> list[Any]:
    """Run a call eagerly: ``start_eagerly``, then ``finish``."""
    return finish(start_eagerly(call, arrays))[0]


def split_watched(call: CollectiveCall, arrays: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the arrays to send, and the parameters that are only compared."""
    count = len(arrays) - len(call.watched)
    return arrays[:count], arrays[count:]


def _compare(call: CollectiveCall, name: str, parameters: Sequence[Any]) -> None:
    if parameters:
        compare_once(
            name, call.watched, lambda: [np.asarray(parameter) for parameter in parameters],
            call.remedy, call.process_set,
        )  # fmt: skip


def place(result: Any, like: Any) -> Any:
    """Return ``result`` on the device of ``like`` if the user committed ``like`` to it; else unchanged."""
    if not like.committed or not isinstance(result, jax.Array):
        return result
    return jax.device_put(result, like.sharding if result.shape == like.shape else next(iter(like.devices())))


def _described(call: CollectiveCall, name: str | None) -> engine_calls.Call:
    return engine_calls.call(
        call.kind, name, id_of(call.process_set), call.op, call.prescale, call.postscale, call.root, call.splits,
        parts=call.parts,
    )  # fmt: skip


def numbered(name: str | None, count: int) -> list[str | None]:
    """Return names for the parts of an operation without groups; a single part keeps the name."""
    return [name] if count == 1 else [name and f"{name}.{index}" for index in range(count)]


# -- inside a program --------------------------------------------------------------------------------------------


class _Into:
    """Allocator that lets the engine write results only to XLA's memory; so it has no ``over``."""

    kernels = NumpyAdapter.kernels
    address = NumpyAdapter.address

    def __init__(self, outputs: Sequence[Array]) -> None:
        self._outputs = list(outputs)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Array:
        """Return XLA's memory for the next result, or new memory if the result has an unexpected shape."""
        target = self._outputs.pop(0)
        return target if target.shape == shape else _adapter.empty(shape, dtype, like)


_adapter = NumpyAdapter()


def run_in_program(
    call: CollectiveCall, name: str, inputs: Sequence[Array], outputs: Sequence[Array], parameters: Sequence[Any] = ()
) -> None:
    """Run a call on XLA's memory.

    Raises:
        HorovodInternalError: the collective failed.

    Blocks until all members called.
    """
    here = call.process_set
    if not keeps_shape(call.kind) and (call.size, call.place) != (here.size(), here.rank()):
        told = f"rank {here.rank()} of {here.size()}"
        raise HorovodInternalError(
            f"{call.verb} {name!r} is part of a program that was compiled for rank {call.place} of {call.size}, and "
            f"this is {told}; call jax.clear_caches() after hvd.init()"
        )
    _compare(call, name, parameters)
    if call.kind is Kind.ALLREDUCE:
        _reduce(call, name, inputs, outputs)
    elif call.kind is Kind.BROADCAST:
        _wait_for([
            _submit(call, key, [source], [target])
            for key, source, target in zip(numbered(name, len(inputs)), inputs, outputs, strict=True)
        ])  # fmt: skip
    elif call.kind is Kind.ALLGATHER and call.rows is None:
        _gather_evenly(call, name, inputs, outputs)
    elif COLLECTIVES[call.kind].has_groups:
        _move(call, name, inputs, outputs)
    else:
        for key, source, target in zip(numbered(name, len(inputs)), inputs, outputs, strict=True):
            _move(call, key, [source], [target])


def _gather_evenly(call: CollectiveCall, name: str, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    """Gather along a new dimension: then different numbers of rows are a mismatch, not another result shape."""
    stacked = [output.reshape(call.size, *source.shape) for source, output in zip(inputs, outputs, strict=True)]
    try:
        _move(call, name, [source[None] for source in inputs], stacked)
    except MismatchError as error:
        raise MismatchError(
            f"{error}\nInside a compiled program, whose shapes are fixed, allgather needs the same number of rows on "
            "every rank (they are the second number above). Pad them, or call it outside of jit"
        ) from None


def _reduce(call: CollectiveCall, name: str, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    context.engine().run(_described(call, name), _adapter, inputs, outputs)
    if call.only_root not in (-1, context.world().rank):
        for output in outputs:
            output.fill(0)


def _submit(call: CollectiveCall, name: str | None, inputs: Sequence[Array], outputs: Sequence[Array]) -> Any:
    return context.engine().submit(_described(call, name), _adapter, inputs, outputs, patient=True)


def _wait_for(handles: Sequence[Any]) -> None:
    engine = context.engine()
    for handle in handles:
        engine.wait(handle)


def _move(call: CollectiveCall, name: str | None, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    """Run a collective whose result shapes change if ranks have joined; raise if they do."""
    handle = context.engine().run(_described(call, name), _Into(outputs), inputs)
    for result, output in zip(handle.outputs, outputs, strict=True):
        if result.shape != output.shape:
            raise HorovodInternalError(
                f"{call.verb} {name!r} gave shape {result.shape} inside a compiled program, which expects "
                f"{output.shape}: a rank has joined. Leave the program out while ranks are in hvd.join()"
            )
        if result is not output:
            np.copyto(output, result)
