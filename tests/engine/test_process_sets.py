"""Process sets end to end: static and added later, overlapping, removed, misused."""

from __future__ import annotations

import numpy as np
import pytest
from harness import on_ranks

import horovod.numpy as hvd


@on_ranks(3, init=False)
def test_sets_given_to_init() -> None:
    even, odd = hvd.ProcessSet([2, 0]), hvd.ProcessSet([1])
    assert (even.process_set_id, even.ranks, even.size(), even.rank()) == (None, [0, 2], None, None)
    hvd.init(process_sets=[even, odd])
    mine = even if hvd.rank() % 2 == 0 else odd
    assert [even.process_set_id, odd.process_set_id] == [1, 2]
    assert [even.included(), odd.included()] == [mine is even, mine is odd]
    assert (mine.size(), mine.rank()) == (len(mine.ranks or []), (mine.ranks or []).index(hvd.rank()))
    total = hvd.allreduce(np.array([float(hvd.rank())]), op=hvd.Sum, process_set=mine)
    assert total.tolist() == [2.0 if mine is even else 1.0]
    average = hvd.allreduce(np.array([float(hvd.rank())]), process_set=mine)
    assert average.tolist() == [1.0]
    assert str(even) == "ProcessSet(process_set_id=1, ranks=[0, 2], mpi_comm=None)"
    # A second init() while running finds the sets of the first one again.
    again = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[again])
    assert again.process_set_id == 1
    hvd.barrier()
    hvd.shutdown()
    assert [even.process_set_id, odd.process_set_id, again.process_set_id] == [None] * 3
    assert hvd.global_process_set.process_set_id == 0
    assert hvd.global_process_set.ranks is None
    assert hvd.global_process_set.included() is None


@on_ranks(3, init=False)
def test_misuse_of_init() -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\] is given twice"):
        hvd.init(process_sets=[hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 0])])
    # As in Horovod, the job itself came up.
    assert hvd.is_initialized()
    # In a job of one rank, a script's even ranks are all ranks, and its odd ones none.
    everybody, nobody = hvd.ProcessSet([0, 1, 2]), hvd.ProcessSet([])
    hvd.init(process_sets=[everybody, nobody])
    assert (everybody.process_set_id, everybody.size(), everybody.included()) == (0, 3, True)
    assert (nobody.process_set_id, nobody.size(), nobody.included()) == (None, None, False)
    assert not hvd.remove_process_set(everybody)
    with pytest.raises(ValueError, match="dynamic"):
        hvd.init(process_sets="static")
    with pytest.raises(ValueError, match=r"ranks \[7\] do not exist in a job of 3"):
        hvd.init(process_sets=[hvd.ProcessSet([0, 7])])
    fine = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[fine])
    assert fine.process_set_id == 1
    hvd.init(process_sets="dynamic")
    hvd.init(comm=[0, 1, 2])
    with pytest.raises(ValueError, match=r"must name ranks from 0 to 2" if hvd.rank() else "call shutdown"):
        hvd.init(comm=[0, 3] if hvd.rank() else [0, 1])


@pytest.mark.quick
@on_ranks(3)
def test_sets_come_and_go() -> None:
    from horovod.bindings.process_sets import process_set_ids_and_ranks

    first, second = hvd.add_process_set([0, 1]), hvd.add_process_set(hvd.ProcessSet([2, 1]))
    assert process_set_ids_and_ranks() == {0: [0, 1, 2], 1: [0, 1], 2: [1, 2]}
    with pytest.raises(ValueError, match="already form process set 1"):
        hvd.add_process_set([1, 0])
    with pytest.raises(ValueError, match="already form process set 0"):
        hvd.add_process_set([2, 1, 0])
    for wrong, text in [
        ([0, 0], "duplicate"),
        ([3], "do not exist"),
        ([-1], "do not exist"),
        ([2**70], "do not exist"),
        ([], "at least one"),
    ]:
        with pytest.raises(ValueError, match=text):
            hvd.add_process_set(wrong)
    with pytest.raises(ValueError, match="integer ranks"):
        hvd.ProcessSet(["zero"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="sequence of ranks"):
        hvd.ProcessSet(3)  # type: ignore[arg-type]
    # Ids come back in the order in which they were freed.
    assert hvd.remove_process_set(second)
    assert hvd.remove_process_set(first)
    assert [first.process_set_id, second.process_set_id] == [None, None]
    assert not hvd.remove_process_set(first)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert not hvd.remove_process_set(hvd.ProcessSet([0]))
    assert hvd.add_process_set([0]).process_set_id == 2
    assert hvd.add_process_set([1]).process_set_id == 1
    assert hvd.add_process_set([2]).process_set_id == 3


@on_ranks(3)
def test_outsiders_and_removed_sets_are_errors_at_the_call() -> None:
    pair = hvd.add_process_set([0, 2])
    calls = [
        lambda: hvd.allreduce(np.ones(1), process_set=pair),
        lambda: hvd.allgather(np.ones(1), process_set=pair),
        lambda: hvd.broadcast(np.ones(1), root_rank=0, process_set=pair),
        lambda: hvd.alltoall(np.ones(2), process_set=pair),
        lambda: hvd.reducescatter(np.ones(2), process_set=pair),
        lambda: hvd.barrier(process_set=pair),
    ]
    if hvd.rank() == 1:
        for call in calls:
            with pytest.raises(ValueError, match=r"of which rank 1 is not a member: it holds \[0, 2\]"):
                call()
        with pytest.raises(ValueError, match="Process is not part of provided process set"):
            pair.rank()
    else:
        for call in calls:
            call()
        with pytest.raises(ValueError, match=r"invalid root rank 1; members are \[0, 2\]"):
            hvd.broadcast(np.ones(1), root_rank=1, process_set=pair)
    hvd.remove_process_set(pair)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(np.ones(1), process_set=pair)
    stale = hvd.ProcessSet([0, 2])
    stale.process_set_id = 1
    with pytest.raises(ValueError, match="which does not exist; was it removed"):
        hvd.allreduce(np.ones(1), process_set=stale)
    with pytest.raises(ValueError, match="not registered"):
        hvd.barrier(process_set=hvd.ProcessSet([0]))
    hvd.barrier()


@on_ranks(4, returns=[300, 300, 3, 3])
def test_disjoint_sets_do_not_wait_for_each_other() -> int:
    """Two sets that never meet: one does much, the other little; neither waits for the other."""
    left, right = hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])
    mine, count = (left, 300) if hvd.rank() < 2 else (right, 3)
    for i in range(count):
        assert hvd.allreduce(np.array([i]), op=hvd.Sum, process_set=mine).tolist() == [2 * i]
    return count


@on_ranks(3)
def test_a_reused_id_has_no_past() -> None:
    rank = hvd.rank()
    for turn, ranks in enumerate([[0, 1], [1, 2], [0, 2], [0, 1]]):
        process_set = hvd.add_process_set(ranks)
        assert process_set.process_set_id == 1
        for i in range(turn + 1 if rank in ranks else 0):
            # The same names, and unnamed ones of another number each turn.
            for name in ("x", None):
                array = np.full(3, float(rank + i))
                result = hvd.allreduce(array, name=name, op=hvd.Sum, process_set=process_set)
                assert result.tolist() == [sum(r + i for r in ranks)] * 3
        hvd.remove_process_set(process_set)
