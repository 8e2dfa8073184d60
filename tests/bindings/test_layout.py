"""Planning of gradient buckets: nothing is lost, nothing overlaps, limits hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.bindings.gradients.layout import Item, plan_buckets


def items(*counts: int, itemsize: int = 4, kind: str = "f32") -> list[Item]:
    return [Item(index, count, itemsize, kind) for index, count in enumerate(counts)]


def test_items_fill_a_bucket_in_order() -> None:
    plans = plan_buckets(items(16, 16, 16), bucket_bytes=128)
    assert [plan.indexes for plan in plans] == [(0, 1), (2,)]


def test_gradients_start_on_64_bytes_and_flags_stand_behind_them() -> None:
    (plan,) = plan_buckets(items(3, 17, 1), bucket_bytes=1 << 20)
    assert plan.offsets == (0, 16, 48)
    assert plan.flags == 64
    assert plan.count == 64 + 3


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_data_divides_into_shards_that_begin_on_64_bytes(shards: int, itemsize: int) -> None:
    for plan in plan_buckets(items(3, 17, 1, 500, itemsize=itemsize), bucket_bytes=1024, shards=shards):
        assert plan.flags % shards == 0
        assert plan.flags // shards * itemsize % 64 == 0
        assert plan.count == plan.flags + len(plan.indexes)


def test_a_large_item_has_a_bucket_of_its_own() -> None:
    plans = plan_buckets(items(4, 1000, 4), bucket_bytes=256)
    assert [plan.indexes for plan in plans] == [(0,), (1,), (2,)]


def test_kinds_do_not_mix() -> None:
    mixed = [Item(0, 4, 4, "f32"), Item(1, 4, 2, "f16"), Item(2, 4, 4, "f32")]
    assert [plan.indexes for plan in plan_buckets(mixed, 1 << 20)] == [(1,), (0, 2)]


def test_groups_are_buckets_whatever_their_size() -> None:
    plans = plan_buckets(items(1000, 4, 1000, 4), bucket_bytes=64, groups=[[2, 0, 77]])
    assert [plan.indexes for plan in plans] == [(1,), (0, 2), (3,)]


def test_a_group_of_two_kinds_is_two_buckets() -> None:
    mixed = [Item(0, 4, 4, "f32"), Item(1, 4, 2, "f16"), Item(2, 4, 4, "f32")]
    assert [plan.indexes for plan in plan_buckets(mixed, 1, groups=[[0, 1, 2]])] == [(1,), (0, 2)]


@given(
    st.lists(st.tuples(st.integers(0, 300), st.sampled_from([1, 2, 4, 8, 16])), max_size=40),
    st.integers(1, 4096),
    st.lists(st.sets(st.integers(0, 45), max_size=6), max_size=4),
)
def test_every_item_has_one_place_of_its_own(
    shapes: list[tuple[int, int]], bucket_bytes: int, groups: list[set[int]]
) -> None:
    disjoint = [group.difference(*groups[:position]) for position, group in enumerate(groups)]
    wanted = [Item(index, count, size, size) for index, (count, size) in enumerate(shapes)]
    plans = plan_buckets(wanted, bucket_bytes, [sorted(group) for group in disjoint])
    assert sorted(index for plan in plans for index in plan.indexes) == list(range(len(shapes)))
    for plan in plans:
        assert len({shapes[index][1] for index in plan.indexes}) == 1
        ends = [o + shapes[i][0] for o, i in zip(plan.offsets, plan.indexes, strict=True)]
        assert all(end <= start for end, start in zip(ends, (*plan.offsets[1:], plan.flags), strict=True))
        assert plan.count == plan.flags + len(plan.indexes)
