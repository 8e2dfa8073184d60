"""Which neighbours are executed as one."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from horovod.core.coordinator import MAX_FUSED, fuse

entries = st.lists(st.tuples(st.sampled_from([None, "a", "b"]), st.integers(0, 40)), max_size=40)


@given(entries=entries, threshold=st.integers(0, 100))
def test_plan(entries: list[tuple[str | None, int]], threshold: int) -> None:
    groups = fuse([(i, key, nbytes) for i, (key, nbytes) in enumerate(entries)], threshold)
    assert [i for group in groups for i in group] == list(range(len(entries)))
    for group in groups:
        if len(group) > 1:
            assert len({entries[i][0] for i in group}) == 1
            assert entries[group[0]][0] is not None
            assert sum(entries[i][1] for i in group) <= threshold
    for left, right in itertools.pairwise(groups):
        # No neighbour is left out that would have fitted.
        key = entries[right[0]][0]
        same = key is not None and key == entries[left[0]][0]
        assert not same or sum(entries[i][1] for i in (*left, right[0])) > threshold


def test_one_entry_may_be_larger_than_the_threshold() -> None:
    assert fuse([(7, "a", 1000), (8, "a", 1)], 100) == [[7], [8]]


def test_a_group_has_an_end() -> None:
    groups = fuse([(i, "a", 0) for i in range(2 * MAX_FUSED + 1)], 1)
    assert [len(group) for group in groups] == [MAX_FUSED, MAX_FUSED, 1]
