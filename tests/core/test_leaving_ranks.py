"""Ranks that leave and ranks that join: only who waits for them is concerned, and nobody waits for ever."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper import PaperHandle, PaperJob, Script, play, request
from paper_hosts import PaperHosts, spread

from horovod.core.requests import Kind, ReduceOp

orders = settings(max_examples=80)
randoms = st.randoms(use_true_random=False)
JOIN = request("join", Kind.JOIN)


def _error(handle: PaperHandle) -> str:
    return handle.response.error


@settings(max_examples=160)
@given(
    counts=st.sampled_from([[2], [3], [5], [1, 1], [2, 1], [2, 2], [1, 1, 2], [3, 2]]),
    rng=st.builds(random.Random, st.integers(0, 1 << 32)),
)
def test_leaving_fails_exactly_what_the_leaver_owes(counts: list[int], rng: random.Random) -> None:
    """On one host and on several."""
    size = sum(counts)
    job = PaperHosts(spread(counts, rng), rng) if len(counts) > 1 else PaperJob(size)
    names = [f"t{i}" for i in range(8)]
    for _ in range(3):  # so that groups of hosts have numbers
        for rank, name in itertools.product(range(size), names):
            job.submit(rank, request(name))
        job.settle()
        job.assert_quiet()
    leaver = rng.randrange(size)
    owed = set(rng.sample(names, rng.randrange(9)))
    handles: dict[tuple[int, str], PaperHandle] = {}
    actions = [(rank, name) for rank in range(size) for name in names if rank != leaver or name not in owed]
    rng.shuffle(actions)
    last = max([i for i, (rank, _) in enumerate(actions) if rank == leaver], default=-1)
    actions.insert(rng.randrange(last + 1, len(actions) + 1), (leaver, "leave"))
    for rank, name in actions:
        if name == "leave":
            job.leave(rank, "rank ended its script")
        else:
            handles[rank, name] = job.submit(rank, request(name))
        if rng.random() < 0.3:
            job.settle()
    job.settle()
    job.assert_quiet()
    for (_, name), handle in handles.items():
        assert _error(handle) == ("rank ended its script" if name in owed else "")
        assert handle.response.error_type == ("PeerLostError" if name in owed else "")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_who_left_first_is_named(order: tuple[int, int]) -> None:
    job = PaperJob(3)
    for rank in order:
        job.coordinator.leave(rank, f"rank {rank} has left")
    handle = job.submit(2, request("a"))
    job.settle()
    assert _error(handle) == f"rank {order[0]} has left"
    assert handle.response.result == order[0]


def test_leaving_disturbs_no_process_set_without_the_leaver() -> None:
    job = PaperJob(3)
    job.agree(request(kind=Kind.ADD_PROCESS_SET, ranks=(0, 1)))
    first = job.submit(0, request("a", process_set=1))
    job.coordinator.leave(2, "gone")
    second = job.submit(1, request("a", process_set=1))
    job.settle()
    assert (_error(first), _error(second)) == ("", "")
    failed = job.submit(0, request("b"))
    job.settle()
    assert _error(failed) == "gone"


def test_what_rank_the_leaver_submitted_still_counts() -> None:
    job = PaperJob(2)
    job.submit(1, request("a"))
    job.coordinator.leave(1, "gone")
    handle = job.submit(0, request("a"))
    job.settle()
    assert _error(handle) == ""


def test_a_rank_that_left_ends_the_wait_of_those_who_joined() -> None:
    job = PaperJob(3)
    joined = job.submit(0, JOIN)
    job.coordinator.leave(2, "rank 2 ended its script")
    job.settle()
    assert _error(joined) == "rank 2 ended its script"
    late = job.submit(1, JOIN)
    job.settle()
    assert _error(late) == "rank 2 ended its script"


# -- join ------------------------------------------------------------------------------------------------------------


@orders
@given(size=st.sampled_from([1, 2, 3, 5]), rng=randoms, named=st.booleans(), ahead=st.booleans())
def test_uneven_data_with_join(size: int, rng: random.Random, named: bool, ahead: bool) -> None:
    """Each epoch every rank has its own number of batches; each batch is reduced over those who have it."""
    job = PaperJob(size)
    epochs = [[rng.randrange(5) for _ in range(size)] for _ in range(3)]
    results: list[list[PaperHandle]] = [[] for _ in range(size)]
    joins: list[list[PaperHandle]] = [[] for _ in range(size)]

    def script(rank: int) -> Script:
        for batches in epochs:
            handles = []
            for batch in range(batches[rank]):
                handles.append(job.submit(rank, request(f"g{batch}" if named else "", op=ReduceOp.AVERAGE)))
                yield None if ahead else handles[-1]
            results[rank] += handles
            joins[rank].append(job.submit(rank, JOIN))
            yield joins[rank][-1]

    play(job, [script(rank) for rank in range(size)], rng.choice)
    job.assert_quiet()
    for rank in range(size):
        wanted = [
            tuple(other for other in range(size) if batches[other] > batch)
            for batches in epochs
            for batch in range(batches[rank])
        ]
        answers = [handle.response for handle in results[rank] if handle.response]
        assert [answer.members for answer in answers] == wanted
        assert {(answer.error, answer.divisor) for answer in answers} <= {("", size)}
    for epoch in range(3):
        last = {joins[rank][epoch].response.result for rank in range(size) if joins[rank][epoch].response}  # type: ignore[union-attr]
        assert len(last) == 1
        assert last <= set(range(size))


def test_join_answers_with_the_rank_that_came_last() -> None:
    job = PaperJob(3)
    handles = [job.submit(rank, JOIN) for rank in (2, 0, 1)]
    job.settle()
    assert [handle.response.result for handle in handles if handle.response] == [1, 1, 1]
    assert job.coordinator.joined == []


def test_what_was_submitted_before_join_still_takes_part() -> None:
    job = PaperJob(2)
    early = job.submit(1, request("a"))
    job.submit(1, JOIN)
    job.settle()
    assert early.response is None
    job.submit(0, request("a"))
    job.settle()
    assert early.response.members == (0, 1)


def test_the_last_join_completes_what_only_the_joined_have_submitted() -> None:
    job = PaperJob(2)
    early = job.submit(0, request("a"))
    job.submit(0, JOIN)
    job.submit(1, JOIN)
    job.settle()
    job.assert_quiet()
    assert early.response.members == (0,)
    assert [handle.request.name for handle in job.ranks[0].executed] == ["a", "join"]


@pytest.mark.parametrize(
    "kind",
    [Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.REDUCESCATTER, Kind.BARRIER],
    ids=lambda kind: kind.name,
)
def test_operations_go_on_without_the_joined(kind: Kind) -> None:
    job = PaperJob(3)
    job.submit(1, JOIN)
    handles = [job.submit(rank, request("a", kind)) for rank in (0, 2)]
    job.settle()
    for handle in handles:
        assert (handle.response.error, handle.response.members) == ("", (0, 2))


@pytest.mark.parametrize(
    ("kind", "how", "text"),
    [
        (Kind.ALLTOALL, {}, "Alltoall is not supported with Join at this time: ranks [1] have joined."),
        (Kind.ADD_PROCESS_SET, {"ranks": (0, 2)}, "Add process set is not supported with Join"),
        (Kind.REMOVE_PROCESS_SET, {"root": 1}, "Remove process set is not supported with Join"),
        (Kind.BROADCAST, {"root": 1}, "with root rank 1, which has called join() and takes no part"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_operations_that_need_the_joined_are_errors(kind: Kind, how: dict[str, object], text: str) -> None:
    job = PaperJob(3)
    job.submit(1, JOIN)
    handles = [job.submit(rank, request("a", kind, site=f"a.py:{rank}", **how)) for rank in (0, 2)]  # type: ignore[arg-type]
    job.settle()
    for handle in handles:
        assert text in _error(handle)
        assert "rank 0: at a.py:0\n  rank 2: at a.py:2" in _error(handle)


def test_a_process_set_goes_on_without_its_joined_members() -> None:
    job = PaperJob(3)
    for rank in range(3):
        job.submit(rank, request(kind=Kind.ADD_PROCESS_SET, ranks=(1, 2)))
    job.submit(1, JOIN)
    handle = job.submit(2, request("a", process_set=1))
    job.settle()
    assert (handle.response.members, handle.response.divisor) == ((2,), 2)


def test_mismatch_among_those_who_have_not_joined() -> None:
    job = PaperJob(3)
    job.submit(0, JOIN)
    handles = [job.submit(rank, request("a", shape=(rank,), site=f"a.py:{rank}")) for rank in (1, 2)]
    job.settle()
    for handle in handles:
        assert "rank 1: [1]  allreduce at a.py:1\n  rank 2: [2]  allreduce at a.py:2" in _error(handle)


def test_waiting_names_neither_the_joined_nor_the_present_as_missing() -> None:
    job = PaperJob(4)
    job.submit(3, JOIN)
    job.submit(1, request("a", site="a.py:7"))
    [(_, waiting, present, missing)] = job.coordinator.waiting()
    assert (waiting.site, present, missing) == ("a.py:7", [1], [0, 2])
    job.coordinator.fail_pending((0, "a"), "too long", "StallError")
    job.settle()
    assert job.coordinator.waiting() == []
    assert _error(job.ranks[1].executed[0]) == "too long"
