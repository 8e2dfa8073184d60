"""Which rank waits for which, on paper."""

from __future__ import annotations

import pytest

from horovod.core import labels
from horovod.core.requests import Kind, Request
from horovod.core.stall import Waiting, circle, names, who_waits_for_whom
from horovod.phrases import list_ranks


def request(name: str, process_set: int = 0) -> Request:
    return Request(name, Kind.ALLREDUCE, process_set, site=f"{name or 'x'}.py:1")


def waiting(name: str, present: list[int], missing: list[int], process_set: int = 0) -> Waiting:
    return Waiting((process_set, name), request(name, process_set), present, missing)


@pytest.mark.parametrize(
    ("operations", "expected"),
    [
        ([("a", [0], [1]), ("b", [1], [0])], [0, 1]),
        ([("a", [0, 2], [1]), ("b", [1], [0, 2])], [0, 1]),
        ([("a", [0], [1]), ("b", [1], [2]), ("c", [2], [0])], [0, 1, 2]),
        ([("a", [0], [1]), ("b", [1], [2]), ("c", [2], [1])], [1, 2]),
        ([("a", [0], [1])], []),
        ([("a", [0, 1], [2]), ("b", [2], [3])], []),
    ],
)
def test_circles(operations: list[tuple[str, list[int], list[int]]], expected: list[int]) -> None:
    items = [waiting(*operation) for operation in operations]
    blocked = {rank: item.request for item in items for rank in item.present}
    assert circle(who_waits_for_whom(items, blocked)) == expected


def test_a_rank_that_submitted_and_went_on_waits_for_nobody() -> None:
    items = [waiting("a", [0, 1], [2]), waiting("b", [2], [0])]
    assert sorted(who_waits_for_whom(items, {0: items[0].request})) == [0]


def test_names_are_matched_within_their_process_set() -> None:
    here, there = waiting("a", [0], [1], 0), waiting("a", [0], [2], 1)
    assert who_waits_for_whom([here, there], {0: request("a", 1)})[0].missing == [2]


def test_unnamed_operations_of_a_rank_are_found() -> None:
    item = waiting("", [0], [1])
    assert who_waits_for_whom([item], {0: request("")}) == {0: item}


def test_words() -> None:
    assert list_ranks([3]) == "rank 3"
    assert list_ranks([1, 2]) == "ranks 1, 2"
    assert list_ranks([*range(64), 65, *range(70, 75)]) == "ranks 0-63, 65, 70, 71, 72, 73, 74"
    many = [request(f"allreduce.{letter}") for letter in "abcde"]
    assert names(many).endswith("and 2 more")
    assert names([request("allreduce.w", 4)]) == "allreduce 'w' (allreduce.w.py:1) of process set 4"


def test_what_waits_is_told_in_the_words_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "_labels", {"O.": lambda name, times: f"O{f' step {times}' * bool(times)}, {name[2:]}"})
    assert names([request("allreduce.O.w")]) == "O, w: allreduce 'O.w' (allreduce.O.w.py:1)"
