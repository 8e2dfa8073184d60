"""Operations that some ranks have not submitted: which rank waits for which, and which wait for ever."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from horovod.core.mismatch import describe_waiting
from horovod.core.requests import Request
from horovod.phrases import few

__all__ = ["BREAK_CIRCLE", "Waiting", "circle", "deadlocked", "label", "names", "who_waits_for_whom"]

BREAK_CIRCLE = (
    "Make these calls in one order on all ranks; the steps of several optimizers count, too. Operations "
    "with an _async form may be begun in any order, if all are begun before one of them is waited for."
)
"""The advice against a circle."""


class Waiting(NamedTuple):
    """An operation that some ranks have submitted and others have not; see ``Coordinator.waiting``."""

    key: Hashable
    request: Request
    present: Sequence[int]
    missing: Sequence[int]


def names(requests: Sequence[Request]) -> str:
    """Return the first few operations in words, and how many there are besides."""
    return few([label(request) for request in requests])


def label(request: Request, times: int = 0) -> str:
    """Return an operation in words, with its process set; ``times`` as in ``describe_waiting``."""
    of_set = f" of process set {request.process_set}" if request.process_set else ""
    return f"{describe_waiting(request, times)}{of_set}"


def who_waits_for_whom(waiting: Iterable[Waiting], blocked: Mapping[int, Request]) -> dict[int, Waiting]:
    """Return, for each rank that is blocked in an operation, what it waits for and which ranks are missing there.

    Args:
        waiting: all operations that are not complete.
        blocked: by rank, the request in which its main thread waits.
    """
    found = {}
    for rank, request in blocked.items():
        for item in waiting:
            same = (item.request.process_set, item.request.name) == (request.process_set, request.name)
            if same and rank in item.present and item.missing:
                found[rank] = item
                break
    return found


def circle(waits: Mapping[int, Waiting]) -> list[int]:
    """Return ranks of which each is missing in what the one before waits for, and the first one where the last waits.

    Args:
        waits: by rank, the operation in which it waits.

    Returns:
        The shortest such circle, its smallest rank first; empty when there is none.
    """
    best: list[int] = []
    for start in sorted(waits):
        paths, seen = [[start]], {start}
        while paths and not (best and len(paths[0]) >= len(best)):
            path = paths.pop(0)
            for following in waits[path[-1]].missing:
                if following == start:
                    best = path
                    paths = []
                    break
                if following in waits and following not in seen:
                    seen.add(following)
                    paths.append([*path, following])
    return best


def deadlocked(waits: Mapping[int, Sequence[Collection[int]]]) -> list[int]:
    """Return the ranks that can never go on, no matter what the other ranks do.

    A rank is free if one of its threads waits only for ranks that are not among those considered stuck; what is left
    when no free rank is found any more waits for itself.

    Args:
        waits: by rank of which *every* thread waits, for each operation that a thread waits in, the ranks that have
            not submitted it. A rank that is not mentioned can still do anything.

    Returns:
        Ascending; empty when there is no proof.
    """
    stuck = {rank for rank, operations in waits.items() if operations}
    while True:
        free = {rank for rank in stuck if any(stuck.isdisjoint(missing) for missing in waits[rank])}
        if not free:
            return sorted(stuck)
        stuck -= free
