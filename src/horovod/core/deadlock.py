"""Describe a proven deadlock: where each rank waits, for which ranks, how often it did so, and the likely cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horovod.core.requests import Kind, Request
from horovod.core.stall import BREAK_CIRCLE, label
from horovod.phrases import few, list_ranks

__all__ = ["Stuck", "advice", "describe"]

#: Ranks that have a line of their own in a report.
_MOST_RANKS = 8
_UNEVEN = "for data of different length there is hvd.join(), in PyTorch hvd.uneven_inputs()."


class Stuck(NamedTuple):
    """One rank of a deadlock."""

    rank: int
    who: str  # the rank with its process and host, as text
    request: Request  # the request in which its main thread waits
    missing: Sequence[int]  # the ranks that have not submitted this request
    times: int  # how often this rank has submitted it, this time included
    operations: int  # total number of operations that it has submitted


def describe(stuck: Sequence[Stuck], circle: Sequence[int], age_s: float) -> list[str]:
    """Return the report in lines. In ``circle`` each rank waits for the next one; see ``horovod.core.stall.circle``."""
    by_rank = {item.rank: item for item in stuck}
    lines = [
        f"{list_ranks(by_rank).capitalize()} wait for each other, and will for ever. Nothing has moved for "
        f"{age_s:.1f} s."
    ]
    others = [item for item in stuck if item.rank not in circle]
    shown = [*(by_rank[rank] for rank in circle), *others][:_MOST_RANKS]
    for item in sorted(shown, key=lambda item: item.rank):
        in_all = f"{item.operations} operation{'s' * (item.operations != 1)} in all"
        lines.append(
            f"{item.who} waits in {label(item.request, item.times)}, which {list_ranks(item.missing)} did not submit; "
            f"this rank has submitted {_count(item)}, and {in_all}"
        )
    if len(stuck) > len(shown):
        lines.append(f"{len(stuck) - len(shown)} more ranks wait, too")
    if len(stuck) > 2:  # for two ranks, the lines above already show the circle
        lines.append(f"The circle: {' -> '.join(f'rank {rank}' for rank in [*circle, circle[0]])}.")
    return [*lines, *advice([by_rank[rank] for rank in circle])]


def advice(circle: Sequence[Stuck]) -> list[str]:
    """Return advice, derived from the numbers of submissions.

    The other ranks have done the operation in which a rank waits once less, so the numbers tell the causes apart.
    They are equal in a loop that calls both operations in two orders. They are 0 for a call behind a condition. They
    differ if a rank left out steps. Unnamed calls are counted together, so their number proves nothing.
    """
    distinct = {(item.request.process_set, item.request.name): item for item in circle}
    calls = [item for item in distinct.values() if item.request.kind is not Kind.JOIN]
    done = [item.times - 1 for item in calls]
    never = [item for item in calls if item.times == 1]
    # Operations without a name are only counted together.
    are_counted = all(item.request.name or item.times == 1 for item in calls)
    behind_condition = "a condition that only some ranks meet, such as `if hvd.rank() == 0:`"
    names = {item.request.name.partition(".")[2] for item in calls}
    is_one_set = len({item.request.process_set for item in calls}) == 1  # names belong to their set
    if len(calls) > 1 and len(names) == 1 and "" not in names and is_one_set:
        return [f"These are different operations under one name, {names.pop()!r}: give each a name of its own."]
    if are_counted and never and len(never) < len(calls):
        [first, *_] = never
        return [
            f"No other rank has ever called {label(first.request)}, while "
            f"{few([f'{label(item.request)} was done {_often(item.times - 1)}' for item in calls if item.times > 1])}: "
            f"the order is not the cause. Most likely that call stands behind {behind_condition}: make it on all ranks "
            f"or on none. Or it comes after a loop that had fewer rounds on some ranks: {_UNEVEN}"
        ]
    if are_counted and len(set(done)) > 1:
        counts = ", ".join(f"{label(item.request)} {_often(item.times - 1)}" for item in calls)
        return [
            f"All ranks have done {counts}: the order is not the cause. Most likely a rank has left out steps or "
            "calls that others made: fewer batches, a `continue`, an exception that was caught, or "
            f"{behind_condition}; {_UNEVEN}"
        ]
    hint = (
        f"If they are in one order, then a rank has left out one of them, by {behind_condition}, by a `continue`, "
        f"or by a loop with fewer rounds: {_UNEVEN}"
    )
    return [BREAK_CIRCLE, hint]


def _count(item: Stuck) -> str:
    if not item.request.name:
        return f"{item.times} without a name"
    return f"that one {_often(item.times)}"


def _often(times: int) -> str:
    return "once" if times == 1 else f"{times} times"
