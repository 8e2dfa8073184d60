"""Decides which processes form a job's next generation, and which rank each of them has.

Pure: events go in, decisions come out; the time is part of the events. A *slot* is a place for one process. A
*generation* assigns ranks to slots and never changes; the next change of membership is the next generation. It begins
when all its members have joined it: until then they wait in ``init()`` and can be assigned again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from horovod.core.membership_events import (
    Arrived,
    Assign,
    Begin,
    Decision,
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
    Position,
    Ready,
    Refuse,
    Slot,
    Start,
    Tick,
    TrainingEnded,
    TrainingOver,
)
from horovod.core.membership_processes import NOT_ALIVE, CoolDowns, Phase, Process, Standstill, ordered
from horovod.launchers import cross_place
from horovod.phrases import few

__all__ = ["Membership"]

#: How long a process that was killed may take to end. It runs nothing any more, but the kernel may hold it (state D).
_KILL_S = 5.0
_LONG_S = 10.0  # shorter cool-downs are not reported


class Membership:
    """The members of one job."""

    def __init__(self, policy: Policy) -> None:
        self.generation = 0  # number of the latest assignment, from 1; 0 before the first
        self._policy = policy
        self._hosts: dict[str, int] = {}  # in the order of their arrival
        self._processes: dict[Slot, Process] = {}
        self._phases: dict[Phase, dict[Slot, Process]] = {phase: {} for phase in Phase}
        self._has_begun = self._has_ever_begun = False
        self._has_trained = False  # a process that has ended well
        self._is_draining = False  # as after the training: no more are started, and newcomers not admitted
        self._cool_downs = CoolDowns(policy.cool_down_s)
        self._absent = 0  # processes of another launcher that have ended before the first generation
        self._ranks: dict[Slot, int] = {}  # of the latest generation
        self._failure = ""  # the last one since a generation began
        self._finish: Finish | None = None
        self._now = 0.0
        self._standstill = Standstill()
        self._decisions: list[Decision] = []

    @property
    def wants_change(self) -> bool:
        """Whether the next generation would have other members; if so, ask the present ones to call ``init()``."""
        if not self._is_running():
            return False
        members = self._in(Phase.JOINED)
        staying = sum(map(self._stays, members))
        is_joining = bool(self._phases[Phase.WAITING]) and not self._is_draining and staying < self._policy.most
        return is_joining or (staying < len(members) and not self._awaits_heirs())

    def is_open(self, slot: Slot) -> bool:
        """Whether a process was started in ``slot`` that has not come to ``init()`` yet."""
        process = self._processes.get(slot)
        return process is not None and process.phase is Phase.OUTSIDE

    def handle(self, event: Event) -> list[Decision]:
        """Take one event, and return the decisions, to be carried out in this order. Events of ended processes and of
        earlier generations have no effect.
        """
        self._decisions = []
        if self._finish is not None:
            return [Refuse(event.slot, self._finish.why or "the job has ended")] if isinstance(event, Ready) else []
        if isinstance(event, Tick):
            self._now = event.now_s
            for fenced in self._in(Phase.FENCED):
                if not self._is_dying(fenced):
                    fenced.rank = None
        elif isinstance(event, Discovered):
            tries_again = self._policy.cool_down_s and not self._policy.is_discovering  # lost hosts that the user named
            kept = {host: 0 for host in self._hosts if (tries_again and self._has_ever_begun) or host in event.hosts}
            self._hosts = kept | dict(event.hosts)
        elif isinstance(event, Ended):
            self._take_end(event)
        elif isinstance(event, Arrived):
            self._add(event.slot)  # by another launcher, which orders ranks by the first slots of their hosts
            self._hosts = {each.host: each.number + 1 for each in sorted(self._processes, key=lambda each: each.number)}
        elif (process := self._processes.get(event.slot)) is not None:
            self._take_news(process, event)
        elif isinstance(event, Ready):
            self._decisions.append(Refuse(event.slot, f"no process was started in slot {event.slot}"))
        if not isinstance(event, Ready | Joined):
            self._start()
        self._settle()
        return self._decisions

    def _take_news(self, process: Process, event: Ready | Joined | Left | Leaving | TrainingEnded) -> None:
        if isinstance(event, Leaving):
            process.wants_out = True
            return
        if isinstance(event, TrainingEnded):
            if not self._is_draining:
                self._decisions.append(TrainingOver(self.generation))
            process.is_done = self._is_draining = True
            return
        if isinstance(event, Joined):
            if process.phase is Phase.ASSIGNED and event.generation == self.generation:
                self._set(process, Phase.JOINED)
            return
        if process.phase is Phase.FENCED:
            return
        self._dissolve(process)
        if isinstance(event, Ready):
            if self._is_running() and process.phase is Phase.JOINED:
                self._decisions.append(Paused(self.generation))
            process.is_done = False
            process.has_returned |= process.phase is Phase.GONE
            if self._is_draining and process.rank is not None:
                self._is_draining = self._has_trained or any(p.is_done for p in self._processes.values())
            if event.progress < 0:
                process.rank = None
            process.progress, process.digest, process.is_dismissed = max(event.progress, 0), event.digest, False
        self._set(process, Phase.WAITING if isinstance(event, Ready) else Phase.GONE)

    def _take_end(self, event: Ended) -> None:
        process = self._processes.pop(event.slot, None)
        if process is None:
            return
        self._dissolve(process)
        del self._phases[process.phase][event.slot]
        self._absent += not self.generation
        why = f"slot {event.slot} {event.how}{', after the training had ended' * self._is_draining}"
        if process.wants_out:
            self._cool_downs.rest(event.slot.host, self._now)
        elif not process.is_dismissed and (event.how or process.rank is not None):
            if not event.how:
                # The end of the training, unless a member goes on without it, now or later: then it was a loss.
                goes_on = event.slot not in self._ranks or any(p.rank is not None for p in self._in(Phase.WAITING))
                self._has_trained |= process.is_done
                self._is_draining |= process.is_done or not goes_on
            elif event.slot in self._ranks or not self._has_ever_begun:
                self._failure = why
            delay_s = self._cool_downs.fail(event.slot.host, self._now, self._has_ever_begun)
            if _LONG_S <= delay_s < math.inf and not self._is_draining:
                rests = f"no process is started on {event.slot.host} for {delay_s:g} s, as others failed there"
                self._decisions.append(Note(rests))
            # Without this limit, a script that cannot even begin would be started again for ever.
            # A host that was withdrawn since has most likely failed itself.
            failures = self._cool_downs.count(None if self._policy.is_open else self._hosts)
            if not self._has_ever_begun and failures >= self._policy.size + self._policy.spares:
                self._end(f"no generation has begun, and {failures} processes have failed; the last: {why}")

    def _dissolve(self, process: Process) -> None:
        """Dissolve the generation that a process leaves, if it has not begun: its members still wait in ``init()``."""
        if not self._has_begun and process.phase in (Phase.ASSIGNED, Phase.JOINED):
            for other in self._in(Phase.ASSIGNED, Phase.JOINED):
                self._set(other, Phase.WAITING)
            if len(self._ranks) > 1:
                self._decisions.append(Dissolve(self.generation))

    def _settle(self) -> None:
        """Decide everything that can be decided now."""
        if self._finish is not None:
            return
        if self._has_ever_begun and all(p.rank is None for p in self._processes.values()):
            lost = "" if self._is_draining else "no process is left that has the state of the job"
            self._end("; ".join(filter(None, (lost, self._failure))))
            return
        if self._all_leave():
            self._end("all ranks were asked to leave, or their hosts were withdrawn")
            return
        if self._is_running():
            self._dismiss([p for p in self._in(Phase.WAITING) if not self._stays(p)])
        if self._is_complete():
            self._assign()
        if not self._has_begun and self._phases[Phase.JOINED] and not self._phases[Phase.ASSIGNED]:
            self._has_begun, self._has_ever_begun, self._failure = True, True, ""
            for process in self._in(Phase.JOINED):
                process.rank, process.has_returned = self._ranks[process.slot], False
            self._decisions.append(Begin(self.generation, max(p.progress for p in self._in(Phase.JOINED))))
        if not self._finish and self._is_hopeless():
            few = f"fewer than {self._policy.minimum} slots are left"
            self._end("; ".join(filter(None, (few if self._processes else "", self._failure))))
        self._watch()

    def _dismiss(self, processes: Iterable[Process]) -> None:
        for process in processes:
            process.is_dismissed = True
            self._set(process, Phase.GONE)
            why = "it asked to leave" if process.wants_out else f"host {process.slot.host} was withdrawn from the job"
            self._decisions.append(Refuse(process.slot, why, is_dismissal=True))

    def _start(self) -> None:
        policy = self._policy
        if self._is_draining or self._finish is not None:
            return
        leaving = sum(not self._stays(p) for p in self._processes.values() if p.phase not in NOT_ALIVE)
        room = policy.most + policy.spares - self._alive() + leaving
        for slot in self._free():
            if room > 0 and self._cool_downs.ends_at(slot.host) <= self._now:
                self._add(slot)
                self._decisions.append(Start(slot))
                room -= 1

    def _is_complete(self) -> bool:
        """Whether no process is missing for which the next generation has to wait."""
        if self._phases[Phase.ASSIGNED] or self._phases[Phase.JOINED] or self._are_dying():
            return False
        if self.generation:
            return len(self._phases[Phase.WAITING]) >= self._policy.minimum and not self._may_return()
        size = self._policy.size
        if self._policy.is_open:
            size = max(self._policy.minimum, size - self._absent)
        elif self._cool_downs.count() and not self._policy.is_discovering:  # a host may be lost, and its slots with it
            size = max(self._policy.minimum, min(size, self._alive() + self._startable()))
        # Take the processes that were started first; the others are spares.
        places = ordered((p for p in self._processes.values() if p.phase not in NOT_ALIVE), self._hosts)
        first = [p.phase for p in places if not self._is_withdrawn(p)][:size]
        return first == [Phase.WAITING] * size

    def _may_return(self) -> bool:
        """Whether a script that calls ``shutdown()`` and ``init()`` has still to call ``init()`` in a member."""
        left = any(p.rank is not None and not p.is_dismissed for p in self._in(Phase.GONE))
        return left and any(p.has_returned for p in self._in(Phase.WAITING))

    def _members(self) -> list[Process]:
        """Return the members of the next generation, by rank; dismiss the processes that may not stay."""
        present = ordered(filter(self._is_admitted, self._in(Phase.WAITING)), self._hosts)
        staying = [process for process in present if self._stays(process)]
        has_heirs = (staying and self._has_ever_begun) or self._awaits_heirs()
        if has_heirs and all(process.rank is None for process in staying):
            return present  # the leaving processes first hand over their state
        self._dismiss(process for process in present if not self._stays(process))
        return staying[: self._policy.most]

    def _assign(self) -> None:
        policy = self._policy
        if self._has_ever_begun and all(process.rank is None for process in self._in(Phase.WAITING)):
            return  # the other processes have the state, and may still come or end well
        members = self._members()
        if len(members) < policy.minimum:
            return
        if policy.resets is not None and self.generation > policy.resets:
            self._end(f"the job has reached its limit of resets, {policy.resets}")
            return
        by_host: dict[str, list[Process]] = {}
        for process in members:
            by_host.setdefault(process.slot.host, []).append(process)
        best, positions = members[0], dict[Slot, Position]()
        for host, processes in enumerate(by_host.values()):
            for local_rank, process in enumerate(processes):
                is_new = process.rank is None and not process.digest and process is not best
                is_behind = is_new or (process.progress, process.digest) != (best.progress, best.digest)
                self._set(process, Phase.ASSIGNED)
                positions[process.slot] = Position(
                    len(positions), local_rank, len(processes),
                    *cross_place([*map(len, by_host.values())], host, local_rank), is_behind,
                    -1 if process.rank is None else process.rank,
                )  # fmt: skip
        self.generation += 1
        self._has_begun = False
        self._ranks = {slot: position.rank for slot, position in positions.items()}
        self._decisions.append(Assign(self.generation, positions))

    def _all_leave(self) -> bool:
        """Whether all that have the state wait, must leave, and nobody is there to take it."""
        if not self._has_ever_begun or self._is_draining or self._are_dying() or self._awaits_heirs():
            return False
        waiting = self._in(Phase.WAITING)
        here = self._in(Phase.OUTSIDE, Phase.ASSIGNED, Phase.JOINED)
        return bool(waiting) and not any(map(self._stays, waiting)) and all(p.rank is None for p in here)

    def _awaits_heirs(self) -> bool:
        """Whether all ranks are in withdrawn slots, and stay until those in others, or their successors, come."""
        ranks = [process for process in self._in(Phase.JOINED, Phase.WAITING) if process.rank is not None]
        if not ranks or self._is_draining or any(process.wants_out or self._stays(process) for process in ranks):
            return False
        return any(not self._is_withdrawn(p) for p in self._in(Phase.OUTSIDE, *NOT_ALIVE)) or self._startable() > 0

    def _is_hopeless(self) -> bool:
        """Whether too few processes are left, and none can be started any more."""
        policy = self._policy
        if self._is_running() or ((policy.is_discovering or policy.is_open) and not self._is_draining):
            return False
        is_host_awaited = 0 in self._hosts.values() and not self._is_draining
        if is_host_awaited or self._phases[Phase.GONE] or self._are_dying():
            return False  # they will end: well, so that the job has, or so that others are started there
        missing = (policy.minimum if any(map(self._is_admitted, self._in(Phase.WAITING))) else 0) - self._alive()
        if not self._hosts or (self._processes and missing <= 0):
            return False
        return self._startable() < max(missing, 1)

    def _watch(self) -> None:
        """Let no process wait for longer than the limit."""
        anybody_waits = any(map(self._is_admitted, self._in(Phase.WAITING, Phase.ASSIGNED)))
        limit_s, limit = self._policy.limit(self._has_ever_begun)
        if self._finish or self._is_running() or (self._processes and not anybody_waits):
            self._standstill.since_s = None
        elif self._standstill.since_s is None:
            self._standstill.begin(self._now)
        elif (waited_s := self._now - self._standstill.since_s) >= limit_s:
            self._standstill.begin(self._now)
            self._time_out(f"within {limit}")
        elif self._phases[Phase.WAITING] and not self._phases[Phase.ASSIGNED] and self._standstill.is_due(self._now):
            late = few([p.slot for p in self._in(Phase.JOINED) or self._in(Phase.OUTSIDE, Phase.GONE)])
            text = f"others have waited {waited_s:.0f} s for {late or 'more processes'} to join them; at most {limit}"
            self._decisions.append(Note(text))

    def _time_out(self, limit: str) -> None:
        late = self._in(Phase.ASSIGNED) or self._in(Phase.JOINED)
        count = sum(map(self._is_admitted, self._in(Phase.WAITING))) + len(late)
        if count < self._policy.minimum and not self._are_dying():
            self._end(f"only {count} of at least {self._policy.minimum} ranks were there {limit}")
        elif 1 < len(self._ranks) == len(self._phases[Phase.ASSIGNED]):
            # Each of them may be the one that the others wait for. Killed ranks could not write their state.
            self._end(f"the {len(late)} ranks did not meet {limit}; can all hosts connect to each other?")
        elif late:
            for process in late:
                self._dissolve(process)
                self._set(process, Phase.FENCED)
                process.fenced_s = self._now
                self._decisions.append(Fence(process.slot, f"it did not come to init() {limit}, and others waited"))
        elif not self._are_dying():
            self._assign()

    def _end(self, why: str) -> None:
        """End the job: refuse all processes that wait in ``init()``."""
        waiting = self._in(Phase.WAITING, Phase.ASSIGNED)
        waiting += self._in(Phase.JOINED) if not self._has_begun else []
        for process in waiting:
            self._set(process, Phase.OUTSIDE)
            self._decisions.append(Refuse(process.slot, why or "the job has ended"))
        self._finish = Finish(why)
        self._decisions.append(self._finish)

    def _add(self, slot: Slot) -> None:
        self._processes[slot] = process = Process(slot)
        self._set(process, Phase.OUTSIDE)

    def _set(self, process: Process, phase: Phase) -> None:
        self._phases[process.phase].pop(process.slot, None)
        process.phase = phase
        self._phases[phase][process.slot] = process

    def _in(self, *phases: Phase) -> list[Process]:
        return [process for phase in phases for process in self._phases[phase].values()]

    def _is_admitted(self, process: Process) -> bool:
        """Whether the next generation may have this process as a member; after the training, newcomers are too late."""
        return not self._is_draining or process.rank is not None

    def _alive(self) -> int:
        alive = len(self._processes) - len(self._phases[Phase.GONE]) - len(self._phases[Phase.FENCED])
        return alive - (self._is_draining and sum(p.rank is None for p in self._in(Phase.OUTSIDE, Phase.WAITING)))

    def _is_dying(self, process: Process) -> bool:
        return self._now - process.fenced_s < _KILL_S

    def _are_dying(self) -> bool:
        return any(map(self._is_dying, self._in(Phase.FENCED)))

    def _startable(self) -> int:
        """Number of slots in which a process can be started, now or later."""
        return 0 if self._is_draining else sum(self._cool_downs.ends_at(s.host) < math.inf for s in self._free())

    def _is_running(self) -> bool:
        """Whether the latest generation has begun and all its members are still in it."""
        return self._has_begun and len(self._phases[Phase.JOINED]) == len(self._ranks)

    def _stays(self, process: Process) -> bool:
        return not process.wants_out and not self._is_withdrawn(process)

    def _is_withdrawn(self, process: Process) -> bool:
        return process.slot.number >= self._hosts.get(process.slot.host, 0)

    def _free(self) -> Iterator[Slot]:
        for host, count in () if self._policy.is_open else self._hosts.items():
            for index in range(count):
                slot = Slot(host, index)
                if slot not in self._processes:
                    yield slot
