"""The ranks that can never go on, and what the numbers say of the cause."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.core import labels
from horovod.core.deadlock import Stuck, advice, describe
from horovod.core.requests import Kind, Request
from horovod.core.stall import deadlocked


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        ({}, []),
        ({0: [[1]], 1: [[0]]}, [0, 1]),
        ({0: [[1]]}, []),
        ({0: [[1]], 1: [[2]], 2: [[0]]}, [0, 1, 2]),
        ({0: [[1]], 1: [[2]]}, []),
        # Rank 2 is free; the others wait for each other all the same, and what rank 2 does changes nothing.
        ({0: [[1, 2]], 1: [[0, 2]]}, [0, 1]),
        # A second thread of rank 0 waits for somebody who may still come.
        ({0: [[1], [2]], 1: [[0]]}, []),
        ({0: [[1], [1]], 1: [[0]]}, [0, 1]),
        # Rank 3 waits for the stuck ones, too.
        ({0: [[1]], 1: [[0]], 3: [[0]]}, [0, 1, 3]),
        ({0: []}, []),
    ],
)
def test_who_is_stuck(waits: dict[int, Sequence[Sequence[int]]], expected: list[int]) -> None:
    assert deadlocked(waits) == expected


@st.composite
def _scenes(draw: st.DrawFn) -> tuple[list[tuple[set[int], set[int]]], dict[int, list[int]]]:
    """Operations with members and those who have submitted them; and ranks that wait, in which of them."""
    size = draw(st.integers(2, 5))
    ranks = st.sets(st.integers(0, size - 1), min_size=1)
    operations = []
    for _ in range(draw(st.integers(1, 6))):
        members = draw(ranks)
        present = draw(ranks) & members
        if present and present != members:
            operations.append((members, present))
    waits = {}
    for rank in range(size):
        own = [index for index, (_, present) in enumerate(operations) if rank in present]
        if own and draw(st.booleans()):
            waits[rank] = draw(st.lists(st.sampled_from(own), min_size=1, max_size=3))
    return operations, waits


@given(_scenes())
def test_exactly_those_are_stuck_whom_nothing_frees(
    scene: tuple[list[tuple[set[int], set[int]]], dict[int, list[int]]],
) -> None:
    operations, waits = scene
    claimed = deadlocked({rank: [m - p for m, p in (operations[i] for i in own)] for rank, own in waits.items()})
    # A free rank submits everything there is.
    free = {rank for members, _ in operations for rank in members} - waits.keys()
    while True:
        done = {index for index, (members, present) in enumerate(operations) if members <= present | free}
        freed = {rank for rank, own in waits.items() if rank not in free and not done.isdisjoint(own)}
        if not freed:
            break
        free |= freed
    assert claimed == sorted(waits.keys() - free)


def _stuck(rank: int, name: str, times: int, kind: Kind = Kind.ALLREDUCE, line: int = 0, process_set: int = 0) -> Stuck:
    wire_name = f"{kind.name.lower()}.{name}" if name else ""
    request = Request(wire_name, kind, site=f"train.py:{line or rank + 1}", process_set=process_set)
    return Stuck(rank, f"rank {rank} (pid {rank})", request, [1 - rank], times, 10 + times)


@pytest.mark.parametrize(
    ("circle", "words"),
    [
        # `if rank == 0: barrier()`, in front of the fourth gradient.
        ([_stuck(0, "", 1, Kind.BARRIER), _stuck(1, "grad", 4)],
         ["No other rank has ever called barrier (unnamed) (train.py:1)",
          "allreduce 'grad' (train.py:2) was done 3 times", "if hvd.rank() == 0:",
          "Or it comes after a loop that had fewer rounds on some ranks", "hvd.uneven_inputs()"]),
        # A step that one rank skipped: it is at the end of its epoch already, for the third time.
        ([_stuck(0, "grad", 118), _stuck(1, "loss", 4)],
         ["have done allreduce 'grad' (train.py:1) 117 times, allreduce 'loss' (train.py:2) 3 times",
          "the order is not the cause", "hvd.join()", "hvd.uneven_inputs()"]),
        ([_stuck(0, "x", 5), _stuck(1, "y", 5)], ["in one order on all ranks"]),
        ([_stuck(0, "x", 1), _stuck(1, "y", 1)], ["in one order on all ranks", "if hvd.rank() == 0:"]),
        ([_stuck(0, "x", 3), _stuck(1, "x", 3, Kind.ALLGATHER)], ["different operations under one name, 'x'"]),
        # Names belong to a set: a ring of sets is a matter of order.
        ([_stuck(0, "x", 1, process_set=1), _stuck(1, "x", 1, process_set=2)], ["in one order on all ranks"]),
        # Two sets in two orders, after other calls without a name.
        ([_stuck(0, "", 1, process_set=1), _stuck(1, "", 2)], ["in one order on all ranks", "hvd.uneven_inputs()"]),
        ([_stuck(0, "", 7), _stuck(1, "x", 4)], ["in one order on all ranks"]),
    ],
)  # fmt: skip
def test_the_numbers_tell_the_causes_apart(circle: list[Stuck], words: list[str]) -> None:
    text = "\n".join(advice(circle))
    for word in words:
        assert word in text
    if "order is not the cause" in text:
        assert "in one order on all ranks" not in text


def test_the_report_names_every_rank_its_line_and_its_count() -> None:
    lines = describe([_stuck(0, "x", 1), _stuck(1, "y", 2)], [0, 1], 12.0)
    assert lines[0].startswith("Ranks 0, 1 wait for each other, and will for ever")
    assert lines[1] == (
        "rank 0 (pid 0) waits in allreduce 'x' (train.py:1), which rank 1 did not submit; "
        "this rank has submitted that one once, and 11 operations in all"
    )
    assert "this rank has submitted that one 2 times, and 12 operations in all" in lines[2]
    assert not any("circle" in line for line in lines)  # the lines of two ranks say as much


def test_the_report_of_many_ranks_is_short() -> None:
    ranks = [_stuck(0, "x", 1), _stuck(1, "y", 1), *(_stuck(rank, "x", 1) for rank in range(2, 64))]
    lines = describe(ranks, [1, 0], 12.0)
    assert len(lines) <= 13
    assert "56 more ranks wait, too" in lines
    assert "The circle: rank 1 -> rank 0 -> rank 1." in lines


def test_the_report_speaks_of_the_steps_of_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "_labels", {"O.": lambda name, times: f"O{f' step {times}' * bool(times)}, {name[2:]}"})
    lines = describe([_stuck(0, "O.w", 118), _stuck(1, "loss", 4)], [0, 1], 12.0)
    assert lines[1].startswith("rank 0 (pid 0) waits in O step 118, w: allreduce 'O.w' (train.py:1), which")
    assert "All ranks have done O, w: allreduce 'O.w' (train.py:1) 117 times" in lines[3]
