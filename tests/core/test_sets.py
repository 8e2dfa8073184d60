"""Process sets: the table, and how the coordinator changes and uses it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper import PaperHandle, PaperJob, Script, play, request

from horovod.core.process_sets import ProcessSetTable
from horovod.core.requests import Kind, Request

orders = settings(max_examples=60)
randoms = st.randoms(use_true_random=False)


def _add(*ranks: int) -> Request:
    return request(kind=Kind.ADD_PROCESS_SET, ranks=ranks)


def _remove(key: int) -> Request:
    return request(kind=Kind.REMOVE_PROCESS_SET, root=key)


def _result(handle: PaperHandle) -> int | str:
    return handle.response.error or handle.response.result


# -- the table -------------------------------------------------------------------------------------------------------


def test_set_zero_holds_all_ranks() -> None:
    table = ProcessSetTable(3)
    assert table.members(0) == (0, 1, 2)
    assert table.as_dict() == {0: [0, 1, 2]}
    assert 0 in table
    assert 1 not in table


def test_ids_are_handed_out_first_in_first_out() -> None:
    table = ProcessSetTable(4)
    assert [table.add([0]), table.add([1]), table.add([2])] == [1, 2, 3]
    table.remove(2)
    table.remove(1)
    assert [table.add([1, 2]), table.add([2, 3]), table.add([0, 3])] == [2, 1, 4]


def test_members_are_ascending_and_found_in_any_order() -> None:
    table = ProcessSetTable(4)
    key = table.add([3, 1])
    assert table.members(key) == (1, 3)
    assert table.find([3, 1]) == table.find([1, 3]) == key
    assert table.find([3, 2]) is None


def test_every_change_is_visible_in_the_version() -> None:
    table = ProcessSetTable(2)
    versions = [table.version]
    key = table.add([0])
    versions.append(table.version)
    table.remove(key)
    versions.append(table.version)
    assert versions == sorted(set(versions))


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ([], "at least one rank"),
        ([1, 1], "duplicate"),
        ([0, 3], "ranks [3] do not exist in a job of 3"),
        ([-1], "ranks [-1] do not exist"),
        ([2, 0, 1], "already form process set 0"),
        ([1, 0], "already form process set 1"),
        ([1, 2], ""),
    ],
)
def test_check(ranks: list[int], why: str) -> None:
    table = ProcessSetTable(3)
    table.add([0, 1])
    assert why in table.check(ranks)
    assert bool(table.check(ranks)) == bool(why)


# -- the coordinator -------------------------------------------------------------------------------------------------


def test_adding_and_removing_answers_every_rank_with_the_id() -> None:
    job = PaperJob(3)
    for wanted, result in ((_add(0, 2), 1), (_add(1), 2), (_remove(1), 1), (_add(1, 2), 1)):
        assert job.agree(wanted).result == result
    assert job.coordinator.sets.as_dict() == {0: [0, 1, 2], 1: [1, 2], 2: [1]}


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (_add(), "at least one rank"),
        (_add(0, 0), "duplicate"),
        (_add(7), "do not exist"),
        (_add(0, 1, 2), "already form process set 0"),
        (_remove(4), "process set 4 cannot be removed"),
        (_remove(0), "process set 0 cannot be removed"),
    ],
)
def test_an_impossible_change_is_a_value_error_for_all(wanted: Request, why: str) -> None:
    job = PaperJob(3)
    response = job.agree(wanted)
    assert why in response.error
    assert response.error_type == "ValueError"
    assert job.coordinator.sets.as_dict() == {0: [0, 1, 2]}


@orders
@given(rng=randoms)
def test_overlapping_and_disjoint_sets_at_work_at_once(rng: random.Random) -> None:
    """Members use their sets in any order; one log serves all."""
    job = PaperJob(5)
    groups = [(0, 1), (1, 2, 3), (3, 4), (0, 4), (2,)]

    def script(rank: int) -> Script:
        keys = {}
        for ranks in groups:
            handle = job.submit(rank, _add(*ranks))
            yield handle
            keys[ranks] = _result(handle)
        mine = [ranks for ranks in groups if rank in ranks] * 3
        rng.shuffle(mine)
        handles = []
        for i, ranks in enumerate(mine):
            name = f"t{mine[:i].count(ranks)}" if len(ranks) > 2 else ""
            handles.append(job.submit(rank, request(name, Kind.BARRIER, process_set=keys[ranks])))
            yield None
        yield from handles

    play(job, [script(rank) for rank in range(5)], rng.choice)
    job.assert_quiet()
    for me in job.ranks:
        for handle in me.executed:
            assert handle.response.error == ""
            if handle.request.process_set:
                assert handle.response.members == groups[handle.request.process_set - 1]
                assert handle.response.divisor == len(handle.response.members)


@orders
@given(rng=randoms)
def test_a_reused_id_starts_afresh(rng: random.Random) -> None:
    """Unnamed requests of the old set do not count for the new one."""
    job = PaperJob(3)
    handles: list[PaperHandle] = []

    def script(rank: int) -> Script:
        for ranks, count in [((0, 1), 3), ((0, 2), 2), ((1, 2), 4)]:
            handle = job.submit(rank, _add(*ranks))
            yield handle
            assert _result(handle) == 1
            for _ in range(count if rank in ranks else 0):
                handles.append(job.submit(rank, request(process_set=1)))
                yield handles[-1]
            yield job.submit(rank, _remove(1))

    play(job, [script(rank) for rank in range(3)], rng.choice)
    job.assert_quiet()
    assert {handle.response.error for handle in handles if handle.response} == {""}


@pytest.mark.parametrize("name", ["grad", ""])
def test_removing_a_set_answers_what_still_waits_in_it(name: str) -> None:
    job = PaperJob(3)
    job.agree(_add(0, 1))
    stuck = job.submit(0, request(name, process_set=1, site="a.py:3"))
    assert job.agree(_remove(1)).result == 1
    job.assert_quiet()
    assert "process set 1" in stuck.response.error
    assert "removed" in stuck.response.error
    job.agree(_add(0, 2))
    fresh = [job.submit(rank, request(name, process_set=1, shape=(9,))) for rank in (0, 2)]
    job.settle()
    assert [_result(handle) for handle in fresh] == [0, 0]
