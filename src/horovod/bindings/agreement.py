"""Check that all ranks pass the same tensors, before a collective on each tensor makes them wait for each other."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from horovod.bindings.objects import allgather_object
from horovod.bindings.process_sets import ProcessSet
from horovod.bindings.runtime import comm
from horovod.engine import callsite
from horovod.errors import MismatchError
from horovod.phrases import few, list_ranks

__all__ = ["agree_on_count", "agree_on_names"]

_SAME_MODEL = "Make the same model on every rank, and pass all of its parameters on all of them."


def agree_on_names(call: str, names: Sequence[str], process_set: ProcessSet, remedy: str = _SAME_MODEL) -> None:
    """Check that every rank has the same names, in any order. ``call`` is the user's, and ``remedy`` the last sentence
    of the error.

    Collective over ``process_set``; ranks that joined take no part.

    Raises:
        MismatchError: some names are missing on some ranks; raised on every rank.
        PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.
    """
    ordered = sorted(names)
    row = [len(ordered), zlib.crc32("\n".join(ordered).encode(errors="surrogatepass"))]
    _agree(call, row, ordered, process_set, remedy)


def agree_on_count(call: str, names: Sequence[str], process_set: ProcessSet) -> None:
    """Check that every rank has the same number of tensors; they are matched by position, so names may differ. ``call``
    is the user's; the error lists the names that other ranks lack.

    Collective over ``process_set``; ranks that joined take no part.

    Raises:
        MismatchError: some ranks have more tensors than others; raised on every rank.
        PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.
    """
    _agree(call, [len(names)], sorted(names), process_set, _SAME_MODEL)


def _agree(call: str, values: list[int], ordered: list[str], process_set: ProcessSet, remedy: str) -> None:
    row = np.array([values])
    rows = comm.allgather(row, name=f"{call}.names", process_set=process_set)
    if (rows == row).all():
        return
    # Send the names only when the ranks disagree.
    everywhere = allgather_object((comm.rank(), ordered), f"{call}.names.difference", process_set)
    place = callsite.here()
    text = f"{_difference(call, dict(everywhere))}\n{remedy}"
    raise MismatchError(f"{text}\n({place})" if place else text)


def _difference(call: str, everywhere: dict[int, list[str]]) -> str:
    having: dict[tuple[int, ...], list[str]] = {}
    for name in dict.fromkeys(name for names in everywhere.values() for name in names):
        having.setdefault(tuple(rank for rank, names in everywhere.items() if name in names), []).append(name)
    told = "".join(
        f"\n  only {list_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'}: {few(names)}"
        for ranks, names in having.items()
        if len(ranks) < len(everywhere)
    )
    counts = ", ".join(f"rank {rank}: {len(names)}" for rank, names in everywhere.items())
    return f"{call} needs the same names on every rank. Received {counts}{told or ', some of them several times'}"
