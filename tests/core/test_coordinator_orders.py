"""Ranks submit in any order: every response once, one log for all, nothing left."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper import Deadlock, PaperJob, Script, play, request, shuffled

from horovod.core.requests import NO_NOTE, Kind, Request

orders = settings(max_examples=80)
sizes = st.sampled_from([1, 2, 3, 5])
randoms = st.randoms(use_true_random=False)

KINDS = [Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER, Kind.BARRIER]


def _program(rng: random.Random, length: int, distinct: int) -> list[Request]:
    """Named requests under different names, unnamed ones in between; signatures repeat."""
    program = []
    for i in range(length):
        kind = rng.choice([Kind.ALLREDUCE, Kind.ALLREDUCE, Kind.ALLREDUCE, *KINDS])
        name = f"t{i}" if rng.random() < 0.6 else ""
        shape = (rng.randrange(distinct) + 1,)
        program.append(request(name, kind, shape=shape, dtype=rng.choice(["float32", "float32", "int64"])))
    return program


@orders
@given(
    size=sizes, rng=randoms, threshold=st.sampled_from([0, 20, 64, 128 << 20]), capacity=st.sampled_from([1, 3, 4096])
)
def test_every_interleaving_answers_everything_once(
    size: int, rng: random.Random, threshold: int, capacity: int
) -> None:
    job = PaperJob(size, threshold, capacity, signatures=rng.choice([2, 1024]))
    for _ in range(2):  # the second round reuses names and signatures
        program = _program(rng, 12, distinct=3)

        def script(rank: int, program: list[Request] = program) -> Script:
            handles = []
            for wanted in shuffled(program, rng):
                handles.append(job.submit(rank, wanted, rng.choice([NO_NOTE, 64 * rank])))
                yield None
            yield from handles

        play(job, [script(rank) for rank in range(size)], rng.choice)
        job.assert_quiet()
    logs = [[(h.request.name, h.request.kind) for h in me.executed] for me in job.ranks]
    assert all(log == logs[0] for log in logs)
    assert len(logs[0]) == 24
    assert not any(h.response and h.response.error for me in job.ranks for h in me.executed)


@orders
@given(size=sizes, rng=randoms)
def test_unnamed_requests_match_in_the_order_of_each_ranks_calls(size: int, rng: random.Random) -> None:
    job = PaperJob(size)
    kinds = [rng.choice(KINDS) for _ in range(10)]

    def script(rank: int) -> Script:
        for kind in kinds:
            job.submit(rank, request(kind=kind))
            yield None

    play(job, [script(rank) for rank in range(size)], rng.choice)
    job.assert_quiet()
    for me in job.ranks:
        assert [handle.request.kind for handle in me.executed] == kinds


@orders
@given(rng=randoms)
def test_fusion_never_reorders(rng: random.Random) -> None:
    """The order of the log is the order in which the last member submitted."""
    job = PaperJob(2, threshold=64)
    names = [f"t{i}" for i in range(20)]
    shapes = {name: (rng.randrange(1, 12),) for name in names}
    for name in names:
        job.submit(0, request(name, shape=shapes[name]))
    rng.shuffle(names)
    for name in names:
        job.submit(1, request(name, shape=shapes[name]))
    job.settle()
    assert [handle.request.name for handle in job.ranks[0].executed] == names
    assert [handle.request.name for handle in job.ranks[1].executed] == names


def _runs(job: PaperJob) -> list[int]:
    """How many responses each execution held."""
    return [len(entry.ids) for entry in job.settle() if entry.response is None]


def _both(job: PaperJob, *requests: Request, note: int = NO_NOTE) -> None:
    for rank in range(2):
        for wanted in requests:
            job.submit(rank, wanted, note)


def test_what_became_ready_together_is_fused_up_to_the_threshold() -> None:
    job = PaperJob(2, threshold=48)
    _both(job, *(request(f"t{i}") for i in range(7)))  # 16 bytes each
    assert _runs(job) == [3, 3, 1]


def test_what_became_ready_apart_is_not_fused() -> None:
    job = PaperJob(2)
    _both(job, request("a"))
    assert _runs(job) == [1]
    _both(job, request("b"))
    assert _runs(job) == [1]


def test_threshold_zero_switches_fusion_off() -> None:
    job = PaperJob(2, threshold=0)
    _both(job, request("a"), request("b"))
    assert _runs(job) == [1, 1]


@pytest.mark.parametrize(
    "other",
    [
        request("b", fuse_class="another"),
        request("b", fuse_class=""),
        request("b", kind=Kind.BROADCAST, fuse_class=request("a").fuse_class),
    ],
)
def test_unlike_requests_are_not_fused(other: Request) -> None:
    job = PaperJob(2)
    _both(job, request("a"), other)
    assert _runs(job) == [1, 1]


def test_what_has_notes_is_not_fused() -> None:
    job = PaperJob(2)
    _both(job, request("a"), request("b"), note=0)
    assert _runs(job) == [1, 1]


def test_a_request_with_which_one_rank_sent_no_note_is_fused() -> None:
    job = PaperJob(2)
    for name in ("a", "b"):
        job.submit(0, request(name), 64)
        job.submit(1, request(name), NO_NOTE)
    assert _runs(job) == [2]


def test_the_classes_of_all_members_count() -> None:
    job = PaperJob(2)
    for name, other in (("a", "x"), ("b", "x"), ("c", "y")):
        job.submit(0, request(name, fuse_class="mine"))
        job.submit(1, request(name, fuse_class=other))
    assert _runs(job) == [2, 1]


def test_every_member_gets_the_placement_of_all() -> None:
    job = PaperJob(2)
    for rank in range(2):
        job.submit(rank, request("a", placement=(rank,)))
    handle = job.submit(0, request("b"))
    job.submit(1, request("b"))
    job.settle()
    (response, _) = [entry.response for entry in job.log if entry.response is not None]
    assert [response.request_of(rank).placement for rank in range(2)] == [(0,), (1,)]
    assert handle.response is not None


def test_a_known_combination_is_declared_once() -> None:
    job = PaperJob(2)
    for _ in range(5):
        _both(job, request("a"))
        job.settle()
    assert len([entry for entry in job.log if entry.response is not None]) == 1


def test_ranks_that_alternate_signatures_cost_one_declaration_per_combination() -> None:
    job = PaperJob(2)
    for i in range(8):
        for rank in range(2):
            job.submit(rank, request("a", kind=Kind.ALLGATHER, shape=(i % 2 + rank,)))
        job.settle()
    declared = [entry.response for entry in job.log if entry.response is not None]
    assert [[r.tensors[0].shape[0] for r in response.requests] for response in declared] == [[0, 1], [1, 2]]


@orders
@given(rng=randoms, capacity=st.integers(1, 4))
def test_ids_are_reused_safely_when_the_capacity_is_small(rng: random.Random, capacity: int) -> None:
    """``PaperJob`` replays the log and compares every meaning with what was submitted."""
    job = PaperJob(2, capacity=capacity, signatures=2)
    for _ in range(15):
        names = rng.sample("abcdefgh", rng.randrange(1, 6))
        for rank in range(2):
            rng.shuffle(names)
            for name in names:
                job.submit(rank, request(name, shape=(ord(name),)))
        if rng.random() < 0.2:
            for rank in range(2):
                job.submit(rank, request("odd", shape=(rank,)))
        job.settle()
        job.assert_quiet()
    ids = {entry.ids[0] for entry in job.log if entry.response is not None}
    assert len(ids) <= capacity + 2


def test_what_comes_at_the_same_moment_is_fused_although_it_is_more_than_is_remembered() -> None:
    job = PaperJob(2, capacity=8)
    for _ in range(3):
        for rank in range(2):
            for i in range(20):
                job.submit(rank, request(f"layer{i}", shape=(i,)))
        runs = [entry.ids for entry in job.settle() if entry.response is None]
        job.assert_quiet()
        assert [len(ids) for ids in runs] == [8, 8, 4]


def test_a_signature_can_be_declared_again_with_another_meaning() -> None:
    job = PaperJob(1, signatures=1)
    for i in range(5):
        handle = job.submit(0, request("a", shape=(i,)))
        job.settle()
        assert handle.response.requests[0].tensors[0].shape == (i,)
    assert set(job.ranks[0].signatures.values()) == {0}


def test_the_paper_job_notices_a_deadlock() -> None:
    """The instrument of these tests works."""
    job = PaperJob(2)

    def script(rank: int) -> Script:
        yield job.submit(rank, request(f"only{rank}"))

    with pytest.raises(Deadlock, match="only0"):
        play(job, [script(0), script(1)], lambda ready: ready[0])
