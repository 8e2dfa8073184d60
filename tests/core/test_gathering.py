"""Requests that hosts submit as groups are decided as if every rank had submitted them, at a cost for each host."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Sequence
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper import PaperHandle, PaperJob, Script, play, request, shuffled
from paper_hosts import PaperHosts, spread

from benchmarks.control import Simulation
from horovod.core.gathering import DeclareGroup, SubmitGroups
from horovod.core.generation import Generation, Member
from horovod.core.hub import HubCoordinator
from horovod.core.requests import NO_NOTE, Kind, Request

orders = settings(max_examples=80)
randoms = st.builds(random.Random, st.integers(0, 1 << 32))
shapes = st.sampled_from([[1, 1], [2, 1], [2, 2], [1, 1, 2], [3, 2]])
JOIN = request("join", Kind.JOIN)


def _program(rng: random.Random, size: int) -> list[list[Request]]:
    """The requests of each rank in a round, in its order: names that repeat, now and then with another signature."""
    common = [request(f"t{i}") for i in rng.sample(range(6), rng.randrange(1, 7))]
    common += [request("", rng.choice([Kind.ALLREDUCE, Kind.BARRIER])) for _ in range(rng.randrange(2))]
    odd, odd_rank = rng.choice([*common, None, None, None, None]), rng.randrange(size)
    kind = rng.choice([Kind.ALLGATHER, Kind.ALLREDUCE])
    program = []
    for rank in range(size):
        mine = [
            request(wanted.name, kind if wanted.name else wanted.kind, shape=(4 + (rank == odd_rank),))
            if wanted is odd
            else wanted
            for wanted in common
        ]
        program.append(shuffled(mine, rng))
    return program


def _answers(handles: Sequence[PaperHandle]) -> list[object]:
    return [None if h.response is None else (h.request, h.response) for h in handles]


@orders
@given(counts=shapes, rng=randoms, capacity=st.sampled_from([1, 3, 4096]), signatures=st.sampled_from([2, 1024]))
def test_every_rank_is_answered_as_if_each_had_submitted_by_itself(
    counts: list[int], rng: random.Random, capacity: int, signatures: int
) -> None:
    """Same submissions, same looks: by name the same answers at the same look, joins, mismatches and all."""
    size = sum(counts)
    plain = PaperJob(size, capacity=capacity, signatures=signatures)
    hosts = PaperHosts(spread(counts, rng), random.Random(rng.random()), capacity=capacity, signatures=signatures)
    mine: list[tuple[PaperHandle, PaperHandle]] = []

    def compare() -> None:
        plain.settle()
        hosts.settle_all()
        assert _answers([a for a, _ in mine]) == _answers([b for _, b in mine])

    for _ in range(6):
        program = _program(rng, size)
        joining = rng.random() < 0.2
        if joining:
            program = [[*todo[: rng.randrange(len(todo) + 1)], JOIN] for todo in program]
        turns = [rank for rank, todo in enumerate(program) for _ in todo]
        rng.shuffle(turns)
        for rank in turns:
            wanted = program[rank].pop(0)
            note = rng.choice([NO_NOTE, NO_NOTE, NO_NOTE, 64 * rank])
            mine.append((plain.submit(rank, wanted, note), hosts.submit(rank, wanted, note)))
            if joining or rng.random() < 0.1:
                compare()
        compare()
    hosts.assert_quiet()


@orders
@given(
    counts=shapes,
    rng=randoms,
    threshold=st.sampled_from([0, 64, 128 << 20]),
    capacity=st.sampled_from([1, 3, 4096]),
    signatures=st.sampled_from([2, 1024]),
)
def test_hosts_that_lag_behind_each_other_get_one_log(
    counts: list[int], rng: random.Random, threshold: int, capacity: int, signatures: int
) -> None:
    """Messages of hosts and log entries move in any order between them; nobody waits for ever."""
    size = sum(counts)
    job = PaperHosts(spread(counts, rng), rng, threshold, capacity, signatures)

    def script(rank: int, programs: list[list[list[Request]]], joins: bool) -> Script:
        for program in programs:
            handles = []
            for wanted in program[rank]:
                handles.append(job.submit(rank, wanted, rng.choice([NO_NOTE, NO_NOTE, NO_NOTE, 64 * rank])))
                yield None
            yield from handles
        if joins:
            yield job.submit(rank, JOIN)

    for _ in range(3):
        joins = rng.random() < 0.3
        programs = [_program(rng, size) for _ in range(3)]
        if joins:  # some have less to do; the others go on without them
            for rank in range(size):
                for program in programs[rng.randrange(4) :]:
                    program[rank] = []
        play(job, [script(rank, programs, joins) for rank in range(size)], rng.choice)
        job.assert_quiet()


def _rounds(job: PaperHosts, rounds: int, *requests: Request) -> None:
    for _ in range(rounds):
        for rank in range(len(job.ranks)):
            for wanted in requests:
                job.submit(rank, wanted)
        job.settle_all()


def test_the_second_time_hosts_submit_groups_and_these_are_fused_as_ever() -> None:
    job = PaperHosts([[0, 1], [2, 3]], random.Random(0))
    _rounds(job, 1, request("a"), request("b"))
    assert job.sent[SubmitGroups] == 0
    _rounds(job, 1, request("a"), request("b"))
    assert (job.sent[DeclareGroup], job.sent[SubmitGroups]) == (2 * 2, 2)
    before = job.sent
    _rounds(job, 5, request("a"), request("b"))
    assert job.sent - before == {SubmitGroups: 2 * 5}
    assert [len(entry.ids) for entry in job.log if entry.response is None] == [2] * 7


@pytest.mark.parametrize("kind", [Kind.ALLREDUCE, Kind.ALLGATHER])
def test_another_signature_under_a_name_is_seen_at_once_and_groups_come_back_afterwards(kind: Kind) -> None:
    job = PaperHosts([[0, 1], [2, 3]], random.Random(0))
    _rounds(job, 3, request("a", kind))
    handles = [job.submit(rank, request("a", kind, shape=(4 + (rank == 1),))) for rank in range(4)]
    job.flow()  # leaders pass on nothing for being old
    assert all(handle.response is not None for handle in handles)
    assert bool(handles[0].response and handles[0].response.error) == (kind is Kind.ALLREDUCE)
    _rounds(job, 2, request("a", kind))
    before = job.sent
    _rounds(job, 2, request("a", kind))
    assert job.sent - before == {SubmitGroups: 4}


def test_what_a_late_rank_keeps_others_waiting_for_is_known_to_the_coordinator() -> None:
    job = PaperHosts([[0, 1], [2, 3]], random.Random(0))
    _rounds(job, 3, request("a"))
    for rank in (0, 2, 3):
        job.submit(rank, request("a"))
    job.settle_all()
    [(key, wanted, present, missing)] = job.coordinator.waiting()
    assert (key, wanted.name, present, missing) == ((0, "a"), "a", [0, 2, 3], [1])
    assert job.coordinator.is_waiting
    job.submit(1, request("a"))
    job.assert_quiet()
    before = job.sent
    _rounds(job, 1, request("a"))
    assert job.sent - before == {SubmitGroups: 2}


def test_an_error_of_the_coordinator_answers_ranks_whose_host_submitted_a_group() -> None:
    job = PaperHosts([[0, 1], [2, 3]], random.Random(0))
    _rounds(job, 3, request("a"))
    early = [job.submit(rank, request("a")) for rank in (0, 1, 2)]
    job.settle_all()
    job.coordinator.fail_pending((0, "a"), "too long", "StallError")
    job.settle_all()
    assert [handle.response and handle.response.error for handle in early] == ["too long"] * 3
    again = [job.submit(rank, request("a")) for rank in (3, 0, 1, 2)]
    job.assert_quiet()
    assert [handle.response and handle.response.error for handle in again] == [""] * 4


def test_groups_hold_the_members_of_a_process_set_and_end_with_it() -> None:
    job = PaperHosts([[0, 1], [2, 3], [4]], random.Random(0))
    for members in ((1, 2), (0, 1, 4), (2, 3)):
        for rank in range(5):
            job.submit(rank, request("add", Kind.ADD_PROCESS_SET, ranks=members))
        job.settle_all()
        before = job.sent
        for _ in range(5):
            for rank in members:
                job.submit(rank, request("a", process_set=1))
            job.settle_all()
        assert (job.sent - before)[SubmitGroups] == 4 * len({rank // 2 for rank in members})
        late = job.submit(members[0], request("a", process_set=1))
        for rank in range(5):
            job.submit(rank, request("remove", Kind.REMOVE_PROCESS_SET, root=1))
        job.assert_quiet()
        assert f"still waited for ranks {list(members[1:])}" in late.response.error


def _hub_of_pairs() -> HubCoordinator:
    """Two hosts with two ranks each, whose groups 0 are an allreduce of process set 1, the first three ranks."""
    hub = HubCoordinator(Generation([Member(100 + rank, "here") for rank in range(4)], hosts=[[0, 1], [2, 3]]))
    _submit_all(hub, request("add", Kind.ADD_PROCESS_SET, ranks=(0, 1, 2)))
    for rank in range(3):
        hub.declare(rank, 0, request("x", process_set=1))
    for ranks in ((0, 1), (2,)):
        hub.declare_group(ranks[0], 0, tuple((rank, 0) for rank in ranks))
    return hub


def _submit_all(hub: HubCoordinator, wanted: Request) -> None:
    for rank in range(4):
        hub.declare(rank, 1, wanted)
        hub.submit(rank, 1)


def test_the_answer_to_groups_is_forgotten_when_process_sets_change() -> None:
    hub = _hub_of_pairs()
    for _ in range(2):
        hub.submit_groups(0, [0])
        hub.submit_groups(2, [0])
    _submit_all(hub, request("remove", Kind.REMOVE_PROCESS_SET, root=1))
    _submit_all(hub, request("add", Kind.ADD_PROCESS_SET, ranks=(0, 1)))
    hub.take()
    hub.submit_groups(0, [0])
    (response,) = [entry.response for entry in hub.take() if entry.response is not None]
    assert response.members == (0, 1)


def test_groups_that_are_answered_while_another_thread_asks_are_not_waiting() -> None:
    hub = _hub_of_pairs()
    hub.submit_groups(0, [0])
    assert [(present, missing) for _, _, present, missing in hub.waiting()] == [([0, 1], [2])]
    (operation,) = hub._counted
    operation.arrived.clear()  # the other thread has come so far
    assert hub.waiting() == []


def test_a_host_of_which_a_rank_has_joined_goes_on_at_once() -> None:
    job = PaperHosts([[0, 1], [2, 3]], random.Random(0))
    _rounds(job, 3, request("a"))
    job.submit(1, JOIN)
    for _ in range(3):
        handles = [job.submit(rank, request("a")) for rank in (0, 2, 3)]
        job.flow()
        assert [handle.response and handle.response.members for handle in handles] == [(0, 2, 3)] * 3
    for rank in (0, 2, 3):
        job.submit(rank, JOIN)
    job.assert_quiet()
    before = job.sent
    _rounds(job, 1, request("a"))
    assert job.sent - before == {SubmitGroups: 2}


def _calls(ranks: int, hosts: int, tensors: int) -> int:
    """Functions called at the hub in a cached step, from its frames to those of the log; and what hosts send for it."""
    simulation = Simulation(ranks, hosts, tensors)
    calls = 0

    def count(frame: FrameType, event: str, what: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for step in range(4):
        for host in range(hosts):
            simulation.submit(host)
        asked = [simulation.ask(host) for host in range(1, hosts)]
        before = sys.getprofile()
        gc.disable()  # what it frees, of tests before this one, may call functions
        sys.setprofile(count if step == 3 else before)
        try:
            log = simulation.decide([frame for sent in asked for frame in sent])
        finally:
            sys.setprofile(before)
            gc.enable()
        sent = simulation.bring()
    assert sum(len(entry.ids) for entry in log if entry.response is None) == tensors
    assert len(sent) == 1  # encoded once, for all hosts
    assert all(sum(map(len, frames)) < 40 + 2 * tensors for frames in asked)
    return calls


def test_a_cached_step_costs_the_hub_no_calls_per_rank_and_a_few_per_group() -> None:
    """512 ranks on 64 hosts with 200 tensors submit 12,800 groups, in place of 102,400 requests."""
    base = _calls(8, 8, 20)
    assert _calls(32, 8, 20) == base
    assert (_calls(16, 16, 20) - base) / (8 * 20) <= 4
    assert (_calls(8, 8, 60) - base) / (8 * 40) <= 6
