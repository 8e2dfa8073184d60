"""Joined ranks wait for the others as long as these need; but not for a rank that cannot go on.

Only the other ranks know how long they still need. So the watch measures the time since the last submission, and then
whether the missing ranks answer a question. A rank that is stopped, or whose engine cannot run, has stalled; a
rank that answers is computing, and is reported only after a longer time, in case it never joins.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from horovod.core.coordinator import Coordinator
from horovod.core.mismatch import describe_waiting
from horovod.observe.status import StatusReports
from horovod.phrases import list_ranks

__all__ = ["JoinWatch"]

#: Factor by which a rank that answers may take longer than others until it is reported.
_PATIENCE = 20


class JoinWatch:
    """Measures how long joined ranks wait, on the coordinator's rank; never blocks.

    Args:
        reports: asks the other ranks.
        warn_s: seconds until a report; 0 is never.
        limit_s: seconds until the end of the job; 0 is never.
    """

    def __init__(self, reports: StatusReports, warn_s: float, limit_s: float) -> None:
        self._reports = reports
        self._warn_s, self._limit_s = warn_s, limit_s
        self._first_s = min((s for s in (warn_s, limit_s) if s), default=0.0)
        self._state: Hashable = None
        self._since_s = self._next_s = 0.0
        self._asked: list[int] = []
        self._has_told = False

    @property
    def is_busy(self) -> bool:
        """Whether ranks are asked at this moment."""
        return bool(self._asked)

    def inspect(self, coordinator: Coordinator, position: int, clock_s: float) -> tuple[list[str], bool]:
        """Check whether the joined ranks wait for a rank that cannot come.

        Args:
            coordinator: knows the joined ranks and the pending operations.
            position: its rank's position in the log.
            clock_s: the time, in seconds.

        Returns:
            A report in lines, or none; and whether the job must end.
        """
        if not coordinator.joined or not self._first_s:
            self._state, self._asked = None, []
            return [], False
        state = (position, tuple(coordinator.joined), tuple((key, len(p)) for key, _, p, _ in coordinator.waiting()))
        if state != self._state:
            self._state, self._since_s, self._next_s = state, clock_s, clock_s + self._first_s
            self._asked, self._has_told = [], False
        quiet_s = clock_s - self._since_s
        is_over = 0 < self._limit_s <= quiet_s
        if not self._asked:
            # At the limit, ask once more: a rank that was stopped may have gone on.
            if clock_s < self._next_s and not is_over:
                return [], False
            self._asked = [rank for rank in range(coordinator.size) if rank not in coordinator.joined]
            self._reports.ask(self._asked)
        if not self._reports.is_complete(self._asked):
            return [], False
        asked, self._asked, self._next_s = self._asked, [], clock_s + self._first_s
        silent = [rank for rank in asked if not self._reports.has_answered(rank)]
        patience_s = self._warn_s if silent else self._warn_s * _PATIENCE
        is_over = is_over and bool(silent)
        if not is_over and (self._has_told or not 0 < patience_s <= quiet_s):
            return [], False
        self._has_told = True
        head = (
            f"{_wait(coordinator.joined)} in {describe_waiting(coordinator.join_request)} for "
            f"{list_ranks(silent or asked)}, and nothing was submitted for {quiet_s:.1f} s:"
        )
        return [head, *self._reports.tell(silent or asked, [], [])], is_over


def _wait(ranks: Sequence[int]) -> str:
    return f"{list_ranks(sorted(ranks))} wait{'s' * (len(ranks) == 1)}"
