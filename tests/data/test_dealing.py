"""Rows of Parquet files over ranks: each row once, and the same number of steps on all ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.errors import RequestError
from horovod.spark.common.dealing import deal, steps_of
from horovod.splits import split_evenly

GROUPS = st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=5)


@given(GROUPS, st.integers(1, 5), st.integers(1, 6))
def test_every_row_has_one_rank_and_one_batch(groups: list[list[int]], size: int, batch_size: int) -> None:
    rows = [
        (file, group, row) for file, counts in enumerate(groups) for group, n in enumerate(counts) for row in range(n)
    ]
    pieces = [deal(groups, rank, size) for rank in range(size)]
    dealt = [[(p.file, p.group, row) for p in part for row in range(p.start, p.stop)] for part in pieces]
    assert [row for part in dealt for row in part] == rows
    counts = [len(part) for part in dealt]
    assert max(counts) - min(counts) <= 1
    if len(rows) < size:
        with pytest.raises(RequestError, match=f"has {len(rows)} rows for {size} ranks"):
            steps_of(len(rows), size, batch_size, "training")
        return
    steps = steps_of(len(rows), size, batch_size, "training")
    for count in counts:
        batches = [len(part) for part in split_evenly(count, steps)]
        assert len(batches) == steps and min(batches) > 0
        assert max(batches) <= (2 if batch_size == 1 and count > steps else batch_size)
