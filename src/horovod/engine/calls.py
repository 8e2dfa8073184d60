"""The description of a collective call without its tensors; it travels from the binding to the transport."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import msgspec

from horovod.core.requests import Kind, ReduceOp
from horovod.errors import RequestError
from horovod.phrases import printable

__all__ = ["Call", "call", "named_only", "naming", "refuse_unnamed"]


class Call(msgspec.Struct, frozen=True, cache_hash=True):
    """An operation as the binding asks for it, without tensors.

    Attributes:
        kind: which collective.
        name: the key of the match, which begins with the kind; empty for the order of submission.
        op: the reduction, for reductions only.
        prescale: factor applied before a reduction.
        postscale: factor applied after it.
        root: global rank of a broadcast's root.
        splits: rows for each member of an alltoall.
        process_set: id of the process set.
        ranks: members of a process set to add.
        device: where the caller's tensors live.
    """

    kind: Kind
    name: str = ""
    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: tuple[int, ...] = ()
    process_set: int = 0
    ranks: tuple[int, ...] = ()
    device: str = "cpu"

    def on(self, device: str) -> Call:
        """Return the same call for tensors of another device."""
        return msgspec.structs.replace(self, device=device)


@functools.lru_cache(maxsize=8192)
def call(
    kind: Kind,
    name: str | None = None,
    process_set: int = 0,
    op: ReduceOp = ReduceOp.SUM,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    splits: tuple[int, ...] = (),
    ranks: tuple[int, ...] = (),
) -> Call:
    """Return the one ``Call`` with these values; ``name`` as the user gave it, without the kind.

    Raises:
        TypeError: the name is neither a string nor an integer.
    """
    if name is not None and not isinstance(name, (str, int)):
        raise TypeError(
            f"name must be a string, the same on all ranks; received {name!r} of type {type(name).__name__}"
        )
    wire_name = printable(f"{kind.name.lower()}.{name}") if name else ""
    return Call(kind, wire_name, op, prescale, postscale, root, splits, process_set, ranks)


class _Naming(threading.local):
    advice = ""


#: Per thread: the advice in errors about unnamed operations; empty if operations need no name.
naming = _Naming()


@contextlib.contextmanager
def named_only(advice: str) -> Iterator[None]:
    """Refuse unnamed operations of this thread inside the context.

    Args:
        advice: for the error: the reason and the remedy.
    """
    before, naming.advice = naming.advice, advice
    try:
        yield
    finally:
        naming.advice = before


def refuse_unnamed(unnamed: Call) -> None:
    """Raise the RequestError for an unnamed call inside ``named_only``, with the advice in ``naming``."""
    raise RequestError(f"{unnamed.kind.name.lower()} has no name. {naming.advice}")
