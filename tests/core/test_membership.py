"""Memberships by tables, and by events in any order: one rank 0 that has the state, no gaps, no endless wait."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from horovod.core.membership import Membership
from horovod.core.membership_events import (
    Assign,
    Begin,
    Decision,
    Discovered,
    Ended,
    Fence,
    Finish,
    Joined,
    Leaving,
    Policy,
    Ready,
    Refuse,
    Slot,
    Start,
    Tick,
)

A0, A1, A2, B0, B1 = (Slot(host, i) for host, i in (("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)))
KILLED = "was killed by SIGKILL"
ELASTIC = Policy(4, is_elastic=True, minimum=2, maximum=5, is_discovering=True, cool_down_s=(10, 40))


def _started(policy: Policy, **hosts: int) -> Membership:
    """A job whose first generation has begun."""
    members = Membership(policy)
    started = [d.slot for d in members.handle(Discovered(hosts)) if isinstance(d, Start)]
    for slot in started:
        _do(members, Ready(slot))
    return members


def _do(members: Membership, event: Ready | Ended | Leaving | Discovered | Tick) -> list[Decision]:
    """Hand over an event; all that are assigned join."""
    decisions = members.handle(event)
    for decision in decisions:
        if isinstance(decision, Assign):
            for slot in decision.positions:
                decisions = [*decisions, *members.handle(Joined(slot, decision.generation))]
    return decisions


def _ranks(decisions: list[Decision]) -> list[Slot]:
    return next(list(d.positions) for d in decisions if isinstance(d, Assign))


def _kinds(decisions: list[Decision]) -> list[type]:
    return [type(d) for d in decisions]


def test_the_first_generation_has_the_ranks_of_the_hosts_in_their_order() -> None:
    members = Membership(Policy(4))
    assert members.handle(Discovered({"a": 3, "b": 2})) == [Start(A0), Start(A1), Start(A2), Start(B0)]
    for slot in (B0, A2, A1):
        assert members.handle(Ready(slot)) == []
    (assign,) = members.handle(Ready(A0))
    assert isinstance(assign, Assign)
    assert {s: p[:5] for s, p in assign.positions.items()} == {
        A0: (0, 0, 3, 0, 2), A1: (1, 1, 3, 0, 1), A2: (2, 2, 3, 0, 1), B0: (3, 0, 1, 1, 2),
    }  # fmt: skip
    for slot in (A0, A1, A2):
        assert members.handle(Joined(slot, 1)) == []
    assert members.handle(Joined(B0, 1)) == [Begin(1)]


def test_a_failure_ends_a_job_that_is_not_elastic() -> None:
    members = _started(Policy(2), a=2)
    assert members.handle(Ended(A1, KILLED)) == [Finish("slot a:1 was killed by SIGKILL")]
    assert members.handle(Ended(A0, KILLED)) == []
    assert _kinds(members.handle(Ready(A0))) == [Refuse]


def test_a_failure_is_told_to_those_that_wait() -> None:
    members = Membership(Policy(2))
    members.handle(Discovered({"a": 2}))
    members.handle(Ready(A0))
    why = "slot a:1 was killed by SIGKILL"
    assert members.handle(Ended(A1, KILLED)) == [Refuse(A0, why), Finish(why)]


def test_nobody_waits_for_a_process_that_has_ended_well() -> None:
    members = Membership(Policy(3))
    members.handle(Discovered({"a": 3}))
    members.handle(Ready(A0))
    assert _kinds(members.handle(Ended(A1))) == [Refuse]
    assert _kinds(members.handle(Ready(A2))) == [Refuse]
    assert members.handle(Ended(A0)) == []
    assert members.handle(Ended(A2)) == [Finish("")]


def test_a_job_of_fixed_size_can_call_init_again() -> None:
    members = _started(Policy(2), a=2)
    for slot in (A0, A1):
        assert members.handle(Leaving(slot)) == []
    members.handle(Ready(A1))
    assert _ranks(members.handle(Ready(A0))) == [A0, A1]
    assert members.generation == 2


def test_a_loss_before_all_have_joined_gives_another_generation() -> None:
    members = Membership(dataclasses.replace(ELASTIC, maximum=4))
    members.handle(Discovered({"a": 2, "b": 2}))
    for slot in (A0, A1, B0, B1):
        decisions = members.handle(Ready(slot))
    assert _ranks(decisions) == [A0, A1, B0, B1]
    members.handle(Joined(A1, 1))
    assert _ranks(members.handle(Ended(A0, KILLED))) == [A1, B0, B1]
    assert members.handle(Joined(A1, 1)) == []  # news of an earlier generation
    for slot in (B0, B1):
        members.handle(Joined(slot, 2))
    assert members.handle(Joined(A1, 2)) == [Begin(2)]


def test_survivors_that_are_furthest_come_first_and_hosts_stay_together() -> None:
    members = _started(ELASTIC, a=3, b=2)
    members.handle(Ended(A0, KILLED))
    members.handle(Ready(A1, 6, "x"))
    members.handle(Ready(A2, 7, "y"))
    members.handle(Ready(B0, 7, "z"))
    decisions = members.handle(Ready(B1, 7, "z"))
    assert _ranks(decisions) == [B0, B1, A2, A1]  # most of those that are furthest have state z
    (assign,) = (d for d in decisions if isinstance(d, Assign))
    assert [p.is_behind for p in assign.positions.values()] == [False, False, True, True]


def test_the_order_is_stable_where_all_are_equally_far() -> None:
    members = _started(ELASTIC, b=2, a=3)
    members.handle(Ended(B0, KILLED))
    for slot in (A2, A1, B1):
        members.handle(Ready(slot, 3, "x"))
    assert _ranks(members.handle(Ready(A0, 3, "x"))) == [B1, A0, A1, A2]


def test_a_spare_is_admitted_at_the_next_boundary() -> None:
    members = _started(ELASTIC, a=2, b=2)
    before = members.wants_change
    assert members.handle(Discovered({"a": 3, "b": 2})) == [Start(A2)]
    assert members.handle(Ready(A2)) == []
    assert (before, members.wants_change) == (False, True)
    for slot in (A0, A1, B0):
        assert members.handle(Ready(slot, 5, "x")) == []
    assert _ranks(members.handle(Ready(B1, 5, "x"))) == [A0, A1, A2, B0, B1]


def test_processes_of_a_withdrawn_host_are_refused_at_the_next_boundary() -> None:
    members = _started(ELASTIC, a=2, b=2)
    members.handle(Discovered({"b": 2}))
    assert members.wants_change
    for slot in (A0, A1, B0):
        members.handle(Ready(slot, 5))
    decisions = members.handle(Ready(B1, 5))
    assert _kinds(decisions) == [Refuse, Refuse, Assign]
    assert _ranks(decisions) == [B0, B1]


def test_a_host_is_used_again_when_it_has_cooled_down() -> None:
    members = _started(dataclasses.replace(ELASTIC, maximum=4), a=2, b=2)
    for after, wait_s in enumerate((10, 20, 40, 40)):
        begin = 1000.0 * (after + 1)
        assert members.handle(Tick(begin)) == []
        members.handle(Ended(B1, KILLED))
        assert members.handle(Tick(begin + wait_s - 1)) == []
        assert members.handle(Tick(begin + wait_s)) == [Start(B1)]


def test_fewer_than_the_minimum_end_the_job_after_a_while() -> None:
    members = _started(dataclasses.replace(ELASTIC, minimum=3, cool_down_s=None), a=2, b=2)
    for slot in (B0, B1):
        members.handle(Ended(slot, KILLED))
    for slot in (A0, A1):
        assert members.handle(Ready(slot)) == []
    assert members.handle(Tick(599)) == []
    assert _kinds(members.handle(Tick(600))) == [Refuse, Refuse, Finish]


def test_too_few_slots_end_a_job_at_once_if_there_will_be_no_others() -> None:
    members = _started(Policy(2, is_elastic=True, minimum=2), a=2)
    members.handle(Ended(A1, KILLED))
    assert members.handle(Ready(A0))[-1] == Finish("fewer than 2 slots are left; slot a:1 was killed by SIGKILL")


def test_a_member_that_does_not_come_is_fenced() -> None:
    members = _started(dataclasses.replace(ELASTIC, cool_down_s=None), a=2, b=2)
    for slot in (A0, A1, B0):
        members.handle(Ready(slot, 5))
    (fence,) = members.handle(Tick(600))
    assert isinstance(fence, Fence)
    assert fence.slot == B1
    assert members.handle(Ready(B1, 5)) == []  # only its end is a verdict
    assert _ranks(members.handle(Ended(B1, KILLED))) == [A0, A1, B0]


def test_the_others_get_another_generation_when_one_does_not_join() -> None:
    members = Membership(Policy(2, is_elastic=True))
    members.handle(Discovered({"a": 2}))
    for slot in (A0, A1):
        members.handle(Ready(slot))
    members.handle(Joined(A0, 1))
    assert _kinds(members.handle(Tick(600))) == [Fence]
    assert _ranks(members.handle(Ended(A1, KILLED))) == [A0]


def test_resets_have_a_limit() -> None:
    members = _started(dataclasses.replace(ELASTIC, resets=1, cool_down_s=None), a=2, b=2)
    for lost, rest in ((B1, (A0, A1, B0)), (B0, (A0, A1))):
        members.handle(Ended(lost, KILLED))
        for slot in rest:
            decisions = _do(members, Ready(slot))
    assert decisions[-1] == Finish("the job was reset 1 times, which is its limit")


def test_a_job_that_has_ended_well_starts_nothing_more() -> None:
    members = _started(ELASTIC, a=2, b=2)
    assert members.handle(Ended(A0)) == []
    assert members.handle(Discovered({"a": 2, "b": 2, "c": 8})) == []
    for slot in (A1, B0):
        assert members.handle(Ended(slot)) == []
    assert members.handle(Ended(B1)) == [Finish("")]


class Job(RuleBasedStateMachine):
    """Processes that do anything at any time; the model knows only what a keeper and an agent know."""

    @initialize(
        elastic=st.booleans(), size=st.integers(1, 4), least=st.integers(1, 4), most=st.integers(0, 3),
        cool=st.sampled_from([None, (5.0, 20.0)]), resets=st.sampled_from([None, 3]), discovering=st.booleans(),
    )  # fmt: skip
    def begin(
        self,
        elastic: bool,
        size: int,
        least: int,
        most: int,
        cool: tuple[float, float] | None,
        resets: int | None,
        discovering: bool,
    ) -> None:
        self.policy = Policy(size, elastic, min(least, size), size + most, resets, cool, 60.0, discovering)
        self.members = Membership(self.policy)
        self.alive: dict[Slot, str] = {}  # outside, init, joined, in
        self.progress: dict[Slot, int] = {}
        self.finish: Finish | None = None
        self.assign: Assign | None = None
        self.now = 0.0
        self.tell(Discovered({"a": size}))

    def tell(self, event: Ready | Joined | Ended | Leaving | Discovered | Tick) -> None:
        for decision in self.members.handle(event):
            assert self.finish is None or isinstance(decision, Refuse)
            if isinstance(decision, Start):
                assert decision.slot not in self.alive
                self.alive[decision.slot], self.progress[decision.slot] = "outside", 0
            elif isinstance(decision, Assign):
                self.check(decision)
            elif isinstance(decision, Begin):
                assert self.assign is not None
                assert all(self.alive[slot] == "joined" for slot in self.assign.positions)
                assert decision.generation == self.assign.generation
                self.alive |= dict.fromkeys(self.assign.positions, "in")
            elif isinstance(decision, Refuse):
                self.alive[decision.slot] = "outside"
            elif isinstance(decision, Fence):
                assert self.policy.is_elastic
                del self.alive[decision.slot]
                self.tell(Ended(decision.slot, KILLED))
            else:
                self.finish = decision

    def check(self, assign: Assign) -> None:
        positions = assign.positions
        assert all(self.alive.get(slot) in ("init", "joined") for slot in positions)
        assert [p.rank for p in positions.values()] == list(range(len(positions)))
        assert self.policy.fewest <= len(positions) <= self.policy.most
        hosts = [slot.host for slot in positions]
        blocks = [host for i, host in enumerate(hosts) if i == 0 or hosts[i - 1] != host]
        assert len(blocks) == len(set(hosts))
        for host in blocks:
            local = [p.local_rank for s, p in positions.items() if s.host == host]
            assert local == list(range(len(local)))
        first = next(iter(positions))
        assert self.progress[first] == max(self.progress[slot] for slot in positions)
        assert all(p.is_behind == (self.progress[s] != self.progress[first]) for s, p in positions.items())
        self.alive |= dict.fromkeys(positions, "init")
        self.assign = assign

    def some(self, data: st.DataObject, *states: str) -> Slot | None:
        found = sorted(slot for slot, state in self.alive.items() if state in states)
        return data.draw(st.sampled_from(found)) if found else None

    @rule(data=st.data(), steps=st.integers(0, 2))
    def ready(self, data: st.DataObject, steps: int) -> None:
        if slot := self.some(data, "outside", "in", "init", "joined"):
            self.progress[slot] += steps if self.alive[slot] == "in" else 0
            self.alive[slot] = "init"
            self.tell(Ready(slot, self.progress[slot]))

    @rule(data=st.data(), stale=st.booleans())
    def joined(self, data: st.DataObject, stale: bool) -> None:
        if (slot := self.some(data, "init")) and self.assign is not None:
            if not stale and slot in self.assign.positions and self.alive[slot] == "init":
                self.join(slot)
            elif stale:
                self.tell(Joined(slot, self.assign.generation - 1))

    def join(self, slot: Slot) -> None:
        assert self.assign is not None
        self.alive[slot] = "joined"
        self.tell(Joined(slot, self.assign.generation))

    @rule(data=st.data(), how=st.sampled_from(["", KILLED]))
    def ended(self, data: st.DataObject, how: str) -> None:
        if slot := self.some(data, "outside", "init", "joined", "in"):
            del self.alive[slot]
            self.tell(Ended(slot, how))

    @rule(data=st.data())
    def leaving(self, data: st.DataObject) -> None:
        if slot := self.some(data, "in"):
            self.alive[slot] = "outside"
            self.tell(Leaving(slot))

    @rule(hosts=st.dictionaries(st.sampled_from("abc"), st.integers(1, 3)))
    def discovered(self, hosts: dict[str, int]) -> None:
        if self.policy.is_elastic and self.policy.is_discovering:
            self.tell(Discovered(hosts))

    @rule(later_s=st.sampled_from([1.0, 6.0, 61.0]))
    def tick(self, later_s: float) -> None:
        self.now += later_s
        self.tell(Tick(self.now))

    @precondition(lambda self: self.finish is not None)
    @invariant()
    def nobody_waits_after_the_end(self) -> None:
        assert not {"init", "joined"} & set(self.alive.values())

    def teardown(self) -> None:
        """From here on everybody does its part, or time passes: then nobody waits, unless as a spare."""
        if not hasattr(self, "members"):
            return
        for _ in range(200):
            if self.finish is not None or not self.waits():
                break
            for slot, state in list(self.alive.items()):
                if state == "init" and self.assign is not None and slot in self.assign.positions:
                    self.join(slot)
            self.now += 10.0
            self.tell(Tick(self.now))
        assert self.finish is not None or not self.waits()

    def waits(self) -> bool:
        """Whether somebody waits that is not a spare of a job that runs."""
        members = [] if self.assign is None else [self.alive.get(slot) for slot in self.assign.positions]
        runs = bool(members) and all(state == "in" for state in members)
        return not runs and bool({"init", "joined"} & set(self.alive.values()))


TestJob = Job.TestCase
TestJob.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("seed", range(3))
def test_512_slots_survive_a_hundred_losses_and_joins(seed: int) -> None:
    rng = random.Random(seed)
    policy = Policy(512, is_elastic=True, minimum=2, cool_down_s=(1, 1))
    members = _started(policy, **{f"h{i}": 8 for i in range(64)})
    slots = [Slot(f"h{i}", j) for i in range(64) for j in range(8)]
    for step in range(100):
        lost = rng.choice(slots)
        _do(members, Ended(lost, KILLED))
        for slot in slots:
            if slot != lost:
                decisions = _do(members, Ready(slot, step))
        assert len(_ranks(decisions)) == 511
        assert _do(members, Tick(10.0 * step + 5)) == [Start(lost)]
        _do(members, Ready(lost))
        assert members.wants_change
        for slot in slots:
            if slot != lost:
                decisions = _do(members, Ready(slot, step))
        assert len(_ranks(decisions)) == 512
        assert next(iter(_ranks(decisions))) != lost
