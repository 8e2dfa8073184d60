"""Near-even splitting."""

from __future__ import annotations

import pytest

from horovod.splits import part_of, split_evenly


@pytest.mark.parametrize(
    ("count", "parts", "lengths"), [(7, 3, [3, 2, 2]), (2, 4, [1, 1]), (0, 2, []), (4, 1, [4]), (6, 3, [2, 2, 2])]
)
def test_longer_runs_come_first_and_nothing_is_left_out(count: int, parts: int, lengths: list[int]) -> None:
    runs = split_evenly(count, parts)
    assert [len(run) for run in runs] == lengths
    assert [index for run in runs for index in run] == list(range(count))
    # Of fewer elements than parts, the last parts are empty.
    parted = [range(*part_of(count, parts, index)) for index in range(parts)]
    assert [run for run in parted if run] == runs
