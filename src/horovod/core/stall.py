"""Find, in operations that some ranks have not submitted, the ranks that each rank waits for, and those deadlocked."""

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
    """Return the first few operations in words, and the number of the others."""
    return few([label(request) for request in requests])


def label(request: Request, times: int = 0) -> str:
    """Return an operation in words, with its process set; ``times`` as in ``describe_waiting``."""
    of_set = f" of process set {request.process_set}" if request.process_set else ""
    return f"{describe_waiting(request, times)}{of_set}"


def who_waits_for_whom(waiting: Iterable[Waiting], blocked: Mapping[int, Request]) -> dict[int, Waiting]:
    """Return, for each rank that is blocked, the operation in which its main thread waits, with its missing ranks."""
    found = {}
    for rank, request in blocked.items():
        for item in waiting:
            same = (item.request.process_set, item.request.name) == (request.process_set, request.name)
            if same and rank in item.present and item.missing:
                found[rank] = item
                break
    return found


def circle(waits: Mapping[int, Waiting]) -> list[int]:
    """Return the shortest circle of ranks, the smallest first: each has not submitted the operation in which the rank
    before it waits. It is empty if there is none.
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
    """Return the ranks that can never go on, ascending, no matter what the others do; none when there is no proof.

    A rank is free if one of its threads waits only for ranks that are not considered stuck. Free ranks are removed
    until no rank is free; the remaining ranks wait for each other. A rank is in ``waits`` only if *every* thread of it
    waits, with the ranks that have not submitted the operation, for each operation; otherwise it can still do anything.
    """
    stuck = {rank for rank, operations in waits.items() if operations}
    while True:
        free = {rank for rank in stuck if any(stuck.isdisjoint(missing) for missing in waits[rank])}
        if not free:
            return sorted(stuck)
        stuck -= free
