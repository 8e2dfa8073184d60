"""Memberships by events in any order: one rank 0 that has the state, no gaps, no endless wait."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from horovod.core.membership import Membership
from horovod.core.membership_events import (
    Assign,
    Begin,
    Discovered,
    Dissolve,
    Ended,
    Event,
    Fence,
    Finish,
    Joined,
    Leaving,
    Left,
    Note,
    Paused,
    Policy,
    Ready,
    Refuse,
    Slot,
    Start,
    Tick,
    TrainingEnded,
    TrainingOver,
)

KILLED = "was killed by SIGKILL"


class Job(RuleBasedStateMachine):
    """Processes that do anything at any time; the model knows only what a keeper and an agent know."""

    @initialize(
        size=st.integers(1, 4), least=st.integers(1, 4), most=st.integers(0, 3),
        cool=st.sampled_from([None, (5.0, 20.0)]), resets=st.sampled_from([None, 3]), discovering=st.booleans(),
        spares=st.integers(0, 2),
    )  # fmt: skip
    def begin(
        self,
        size: int,
        least: int,
        most: int,
        cool: tuple[float, float] | None,
        resets: int | None,
        discovering: bool,
        spares: int,
    ) -> None:
        self.policy = Policy(
            size, min(least, size), size + most, resets, cool, 60.0, is_discovering=discovering, spares=spares
        )
        self.members = Membership(self.policy)
        self.alive: dict[Slot, str] = {}  # outside, init, joined, in
        self.progress: dict[Slot, int] = {}
        self.ranks: dict[Slot, int] = {}  # in their last generation that began
        self.leaving: set[Slot] = set()
        self.hosts: dict[str, int] = {}
        self.finish: Finish | None = None
        self.assign: Assign | None = None
        self.now = 0.0
        self.discovered({"a": size + spares}, always=True)

    def tell(self, event: Event) -> None:
        fenced: list[Slot] = []
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
                self.ranks |= {slot: position.rank for slot, position in self.assign.positions.items()}
            elif isinstance(decision, Dissolve):
                assert self.assign is not None
                assert decision.generation == self.assign.generation
                self.alive |= {slot: "init" for slot, state in self.alive.items() if state == "joined"}
            elif isinstance(decision, Refuse):
                self.alive[decision.slot] = "outside"
                assert not (decision.is_dismissal and self.stays(decision.slot))
            elif isinstance(decision, Fence):
                fenced.append(decision.slot)
            elif isinstance(decision, Paused | TrainingOver):
                assert self.assign is not None
                assert decision.generation == self.assign.generation
            elif isinstance(decision, Finish):
                self.finish = decision
            else:
                assert isinstance(decision, Note)
        for slot in fenced:
            self.lose(slot, KILLED)

    def lose(self, slot: Slot, how: str) -> None:
        del self.alive[slot]
        self.ranks.pop(slot, None)
        self.leaving.discard(slot)
        self.tell(Ended(slot, how))

    def stays(self, slot: Slot) -> bool:
        return slot not in self.leaving and slot.number < self.hosts.get(slot.host, 0)

    def check(self, assign: Assign) -> None:
        positions = assign.positions
        assert all(self.alive.get(slot) in ("init", "joined") for slot in positions)
        assert [p.rank for p in positions.values()] == list(range(len(positions)))
        has_state = [slot for slot in positions if slot in self.ranks]
        is_handover = has_state and not any(self.stays(slot) for slot in has_state)
        assert is_handover or all(map(self.stays, positions))
        assert self.policy.minimum <= len(positions) <= self.policy.most or is_handover
        assert [p.previous for p in positions.values()] == [self.ranks.get(slot, -1) for slot in positions]
        hosts = [slot.host for slot in positions]
        blocks = [host for i, host in enumerate(hosts) if i == 0 or hosts[i - 1] != host]
        assert len(blocks) == len(set(hosts))
        for host in blocks:
            local = [p.local_rank for s, p in positions.items() if s.host == host]
            assert local == list(range(len(local)))
        first = next(iter(positions))
        assert bool(has_state) == bool(self.ranks)
        assert first in (has_state or positions)
        assert self.progress[first] == max(self.progress[slot] for slot in has_state or positions)
        behind = {s for s in positions if s not in self.ranks or self.progress[s] != self.progress[first]} - {first}
        assert {slot for slot, position in positions.items() if position.is_behind} == behind
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
            self.lose(slot, how)

    @rule(data=st.data())
    def wants_out(self, data: st.DataObject) -> None:
        if slot := self.some(data, "outside", "init", "joined", "in"):
            self.leaving.add(slot)
            self.tell(Leaving(slot))

    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        if slot := self.some(data, "in"):
            self.tell(TrainingEnded(slot))

    @rule(data=st.data())
    def left(self, data: st.DataObject) -> None:
        if slot := self.some(data, "in"):
            self.alive[slot] = "outside"
            self.tell(Left(slot))

    @rule(hosts=st.dictionaries(st.sampled_from("abc"), st.integers(1, 3)))
    def discovered(self, hosts: dict[str, int], always: bool = False) -> None:
        if always or self.policy.is_discovering:
            self.hosts = hosts
            self.tell(Discovered(hosts))

    @rule(later_s=st.sampled_from([1.0, 6.0, 61.0]))
    def tick(self, later_s: float) -> None:
        self.now += later_s
        self.tell(Tick(self.now))

    @invariant()
    def members_that_must_go_are_asked_to_come(self) -> None:
        if hasattr(self, "members") and self.assign is not None and self.finish is None:
            members = self.assign.positions
            if all(self.alive.get(slot) == "in" for slot in members) and not all(map(self.stays, members)):
                # They stay if all hosts were exchanged, until the first newcomer waits for their state.
                is_moving = self.hosts and not self.leaving & members.keys() and not any(map(self.stays, members))
                is_met = any(state == "init" and self.stays(slot) for slot, state in self.alive.items())
                assert self.members.wants_change or (is_moving and not is_met)

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
        waiting = [slot for slot, state in self.alive.items() if state in ("init", "joined")]
        has_left = any(state == "outside" for slot, state in self.alive.items() if slot in self.ranks)
        if self.members._is_draining or has_left:  # newcomers wait until the members have ended, too
            waiting = [slot for slot in waiting if slot in self.ranks]
        return not runs and bool(waiting)


TestJob = Job.TestCase
TestJob.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
