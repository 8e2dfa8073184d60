"""The description of a collective call without its tensors; it travels from the binding to the transport."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import msgspec

from horovod.core.requests import Kind, ReduceOp
from horovod.phrases import printable

__all__ = ["Call", "call", "named_only", "naming"]


class Call(msgspec.Struct, frozen=True, cache_hash=True):
    """An operation as the binding asks for it, without tensors."""

    kind: Kind
    name: str = ""  # the key of the match, which begins with the kind; empty for the order of submission
    op: ReduceOp = ReduceOp.SUM  # the reduction, for reductions only
    prescale: float = 1.0  # factor applied before a reduction
    postscale: float = 1.0  # factor applied after it
    root: int = 0  # global rank of a broadcast's root
    splits: tuple[int, ...] = ()  # rows for each member of an alltoall
    process_set: int = 0
    ranks: tuple[int, ...] = ()  # members of a process set to add
    parts: str = ""  # what the tensors are, such as the paths of a pytree's leaves
    device: str = "cpu"  # where the caller's tensors live

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
    parts: str = "",
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
    return Call(kind, wire_name, op, prescale, postscale, root, splits, process_set, ranks, parts)


class _Naming(threading.local):
    advice = ""


#: Per thread: the advice in errors about unnamed operations; empty if operations need no name.
naming = _Naming()


@contextlib.contextmanager
def named_only(advice: str) -> Iterator[None]:
    """Refuse unnamed operations of this thread inside the context, with the reason and the remedy."""
    before, naming.advice = naming.advice, advice
    try:
        yield
    finally:
        naming.advice = before
