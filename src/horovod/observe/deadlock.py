"""Proves that ranks wait for each other for ever, so that the job can end at once.

The proof takes three steps. *Nothing moves*: pending operations and the position in the log have not changed for a
while. *All ranks confirm*: each rank in question is asked, and answers after that: all of its threads that could submit
operations wait for operations, and it has this number in flight. *It fits*: the coordinator, unchanged since before
it asked, knows exactly those. Then the first one to complete would need a submission of a rank that cannot submit, so
none completes; ``horovod.core.stall.deadlocked`` finds the stuck ranks while others are free.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from horovod.core.coordinator import Coordinator
from horovod.core.deadlock import Stuck, describe
from horovod.core.requests import Kind, Request
from horovod.core.stall import Waiting, circle, deadlocked
from horovod.observe.queries import RankStatus
from horovod.observe.stacks import user_lines
from horovod.observe.status import StatusReports

__all__ = ["DeadlockWatch", "waiting_in"]

_INDENT = "    "
#: Number of ranks whose stacks are shown, and number of lines of each.
_MOST_STACKS, _STACK_LINES = 4, 6


class DeadlockWatch:
    """Looks for a proof, on the coordinator's rank, after ``after_s`` without a change; 0 never does. Never blocks."""

    def __init__(self, reports: StatusReports, after_s: float) -> None:
        self._reports = reports
        self._after_s = after_s
        self._state: Hashable = None
        self._since_s = self._next_s = 0.0
        self._asked: list[int] = []

    @property
    def is_busy(self) -> bool:
        """Whether ranks are asked at this moment."""
        return bool(self._asked)

    def inspect(self, coordinator: Coordinator, position: int, clock_s: float) -> list[str]:
        """Continue the proof, and return the report in lines; none as long as there is no proof.

        Everything that the coordinator has decided up to ``position``, its rank's in the log, is executed.
        """
        if not self._after_s:
            return []
        waiting = waiting_in(coordinator, position)
        state = (position, tuple((item.key, tuple(item.present)) for item in waiting))
        if state != self._state:
            self._state, self._since_s, self._next_s = state, clock_s, clock_s + self._after_s
            self._asked = []
            return []
        if clock_s < self._next_s:
            return []
        if not self._asked:
            self._asked = _suspects(waiting)
            if not self._asked:
                self._next_s = clock_s + self._after_s
                return []
            self._reports.ask(self._asked)
        if not self._reports.is_complete(self._asked):
            return []
        statuses = self._reports.statuses(self._asked)
        self._asked, self._next_s = [], clock_s + self._after_s
        waits = {rank: found for rank, answer in statuses.items() if (found := _waits(rank, answer, waiting))}
        stuck = deadlocked({rank: [item.missing for item in found] for rank, found in waits.items()})
        return self._report(stuck, statuses, waits, clock_s - self._since_s) if stuck else []

    def _report(
        self,
        stuck: Sequence[int],
        statuses: dict[int, RankStatus],
        waits: dict[int, list[Waiting]],
        age_s: float,
    ) -> list[str]:
        name = self._reports.name
        parties, ends = [], {}
        for rank in stuck:
            answer = statuses[rank]
            assert answer.blocked is not None
            request, times = answer.blocked.request, answer.blocked.times
            item = ends[rank] = next(item for item in waits[rank] if _same(item.request, request))
            parties.append(Stuck(rank, name(rank), request, item.missing, times, answer.operations))
        round_ = circle(ends)
        lines = describe(parties, round_, age_s)
        for rank in round_[:_MOST_STACKS]:
            lines.append(f"{name(rank)}, its main thread:")
            lines += [_INDENT + line for line in user_lines(statuses[rank].stack, _STACK_LINES)]
        return lines


def waiting_in(coordinator: Coordinator, position: int) -> list[Waiting]:
    """Return the incomplete operations, and the join that some ranks wait in, whose key changes with every progress."""
    waiting = [Waiting(*item) for item in coordinator.waiting()]
    if coordinator.joined:
        present = sorted(coordinator.joined)
        missing = [rank for rank in range(coordinator.size) if rank not in present]
        key = (Kind.JOIN, position, len(present), tuple((item.key, len(item.present)) for item in waiting))
        waiting.append(Waiting(key, coordinator.join_request, present, missing))
    return waiting


def _suspects(waiting: Sequence[Waiting]) -> list[int]:
    """Return the ranks that may be stuck, if they wait for any of their submitted operations."""
    own: dict[int, list[Waiting]] = {}
    for item in waiting:
        for rank in item.present:
            own.setdefault(rank, []).append(item)
    # We do not know for which of them its threads wait: at least one of them must be stuck.
    return deadlocked({rank: [{m for item in items for m in item.missing}] for rank, items in own.items()})


def _waits(rank: int, answer: RankStatus, waiting: Sequence[Waiting]) -> list[Waiting]:
    """Return the operations that all threads of a rank wait for; none if one thread may not be stuck."""
    blocked = [answer.blocked] if answer.blocked is not None else []
    known = [item for item in waiting if rank in item.present]
    if answer.free or answer.failure or not blocked or answer.in_flight != len(known):
        return []
    found: list[Waiting] = []
    for one in (*blocked, *answer.others):
        # Unnamed requests cannot be told apart: report only if each candidate would be stuck.
        same = [item for item in known if _same(item.request, one.request) and item.missing]
        if not same or one.executing:
            return []
        found += same
    return found


def _same(one: Request, other: Request) -> bool:
    if one.kind is Kind.JOIN or other.kind is Kind.JOIN:
        return one.kind is other.kind
    return (one.process_set, one.name) == (other.process_set, other.name)
