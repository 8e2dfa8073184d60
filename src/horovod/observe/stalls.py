"""Stalls: reports ranks that others have waited for too long, and finally raises an error.

There are three watches: the coordinator watches operations that only some ranks have submitted; a rank in the middle of
an operation watches the rank that it waits for; and every other rank watches the coordinator. No call blocks: one call
asks a question, and a later one reports, when the answers have come.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence

from horovod.config import Config
from horovod.core.coordinator import Coordinator
from horovod.core.mismatch import describe_waiting
from horovod.core.requests import Request
from horovod.core.stall import Waiting, names
from horovod.engine.board import Query
from horovod.engine.handles import Handle
from horovod.engine.times import SUBMITTED, now
from horovod.errors import DeadlockError, StallError
from horovod.logs import logger
from horovod.observe.deadlock import DeadlockWatch, waiting_in
from horovod.observe.status import StatusReports
from horovod.phrases import list_ranks

__all__ = ["StallWatch"]

#: How much longer than the coordinator a rank waits before it concludes that the coordinator is stuck, too.
_GRACE_S = 1.0


class StallWatch:
    """Measures the age of pending operations. ``dump`` is called after a stall, with the reason."""

    def __init__(
        self, config: Config, rank: int, size: int, reports: StatusReports, dump: Callable[[str], None]
    ) -> None:
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._reports = reports
        self._dump = dump
        off = config.stall_check_disable
        self._limit_s = 0.0 if off else config.stall_shutdown_s
        self._warn_s = 0.0 if off else config.stall_warn_s
        self._first_s = min((s for s in (self._limit_s, self._warn_s) if s), default=0.0)
        proof_s = config.deadlock_s if not off else 0.0
        self._deadlock = DeadlockWatch(reports, min([proof_s, *(s for s in (self._limit_s, self._warn_s) if s)]))
        self._since: dict[Hashable, float] = {}
        self._warned: set[Hashable] = set()
        self._warned_about: set[tuple[int, ...]] = set()
        self._asked = False
        self._coordinator_fine_ns = 0
        self._asked_in: tuple[int, bool] = (-1, False)

    @property
    def is_busy(self) -> bool:
        """Whether a question is open, so that its answer should be looked for soon."""
        return self._asked or self._deadlock.is_busy

    # -- the coordinator -----------------------------------------------------------------------------------------

    def inspect(self, coordinator: Coordinator, position: int = 0) -> None:
        """Warn about operations that only some ranks have submitted, or raise an error.

        Raises:
            DeadlockError: ranks wait for each other.
            StallError: an operation waits for longer than HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.
        """
        clock = now() / 1e9
        if report := self._deadlock.inspect(coordinator, position, clock):
            raise DeadlockError("\n".join(report))
        if not self._first_s or self._deadlock.is_busy:
            return
        waiting = waiting_in(coordinator, position)
        self._since = {item.key: self._since.get(item.key, clock) for item in waiting}
        self._warned &= self._since.keys()
        ages = {item.key: clock - self._since[item.key] for item in waiting}
        late = [item for item in waiting if item.missing and ages[item.key] >= self._first_s]
        fatal = [item for item in late if self._limit_s and ages[item.key] >= self._limit_s]
        news = [item for item in late if item.key not in self._warned and ages[item.key] >= self._warn_s > 0]
        self._warned_about &= {tuple(item.missing) for item in waiting}
        # Skip operations whose missing ranks were already reported.
        self._warned |= {item.key for item in news if tuple(item.missing) in self._warned_about}
        news = [item for item in news if item.key not in self._warned]
        if not fatal and not news:
            self._asked = False
            return
        # Include operations that are nearly due: often the cause is the same, and one report is better than two.
        nearly = [item for item in waiting if item.missing and ages[item.key] >= self._first_s / 2]
        groups = {tuple(item.missing) for item in [*news, *nearly, *fatal]}
        if not fatal:  # users read the last report, so it must be complete
            groups -= self._warned_about
        told = [item for item in waiting if tuple(item.missing) in groups]
        if not self._asked:
            self._asked = True
            self._reports.ask(self._others, Query.STATUS | Query.DUMP_IF_SET)
        if self._reports.is_complete(sorted({rank for item in told for rank in item.missing})):
            self._asked = False
            self._report(told, max(ages[item.key] for item in told), waiting, bool(fatal))

    def _report(self, told: Sequence[Waiting], age_s: float, waiting: Sequence[Waiting], is_fatal: bool) -> None:
        lines = [f"One or more operations were called by a subset of ranks, and wait for the others for {age_s:.1f} s:"]
        for missing, group in itertools.groupby(sorted(told, key=_missing), _missing):
            items = list(group)
            present = sorted({rank for item in items for rank in item.present})
            lines.append(
                f"{names([item.request for item in items])}: submitted by {list_ranks(present)}, "
                f"missing: {list_ranks(missing)}"
            )
        missing_ranks = sorted({rank for item in told for rank in item.missing})
        present_ranks = sorted({rank for item in told for rank in item.present} - set(missing_ranks))
        self._conclude([*lines, *self._reports.tell(missing_ranks, present_ranks, waiting)], is_fatal)
        self._warned |= {item.key for item in told}
        self._warned_about |= {tuple(item.missing) for item in told}
        self._dump("a stall")

    # -- everybody else ------------------------------------------------------------------------------------------

    def check_coordinator(self, pending: Sequence[Handle]) -> None:
        """Warn, or raise, when an operation here is overdue and the coordinator, which should report it, is stuck.

        Raises:
            StallError: after HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.
        """
        requests = [(handle.times[SUBMITTED], handle.cached.request) for handle in pending]
        if not requests or not self._first_s:
            self._asked = False
            return
        since_ns, request = min(requests, key=lambda pair: pair[0])
        clock = now()
        age_s = (clock - since_ns) / 1e9
        known_fine_s = (clock - self._coordinator_fine_ns) / 1e9
        if age_s < self._first_s + _GRACE_S or known_fine_s < self._first_s:
            self._asked = False
            return
        fatal = bool(self._limit_s) and age_s >= self._limit_s + _GRACE_S
        if not self._asked:
            if not fatal and (0 in self._warned or self._reports.asker_of(0) >= 0):
                return  # another rank asks and reports
            self._asked = True
            self._reports.ask([0])
        if not self._reports.is_complete([0]):
            return
        self._asked = False
        if self._reports.statuses([0]):
            self._coordinator_fine_ns = clock
            self._warned.discard(0)
            return
        what = (
            f"{describe_waiting(request)} was submitted {age_s:.1f} s ago on rank {self._rank}, and the "
            "coordinator, which is rank 0, cannot tell which ranks it waits for:"
        )
        self._conclude([what, *self._reports.tell([0], [], [])], fatal)
        self._warned.add(0)
        self._reports.ask(self._others, Query.DUMP_IF_SET)
        self._dump("the coordinator does not answer")

    def check_execution(self, rank: int, waited_s: float, request: Request | None, sequence: int) -> None:
        """Warn, or raise, when a rank does not go on with an operation that it is part of, at that place in the log.

        Raises:
            StallError: after HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.
        """
        fatal = bool(self._limit_s) and waited_s >= self._limit_s
        told = self._asked_in == (sequence, True)
        if not fatal and (told or not self._warn_s or waited_s < self._warn_s):
            return
        if self._asked_in[0] != sequence or (fatal and told):
            if not fatal and self._reports.asker_of(rank) >= 0:
                self._asked_in = (sequence, True)
                return
            self._asked_in = (sequence, False)
            self._reports.ask(self._others, Query.STATUS | Query.DUMP_IF_SET)
        if not self._reports.is_complete([rank]):
            return
        self._asked_in = (sequence, True)
        what = describe_waiting(request) if request is not None else "a collective"
        first = f"rank {self._rank} has waited for {waited_s:.1f} s in the middle of {what} for rank {rank}."
        self._conclude([first, *self._reports.tell([rank], [], [])], fatal)
        self._dump("a stall in the middle of an operation")

    def _conclude(self, lines: Sequence[str], is_fatal: bool) -> None:
        """Warn, or raise."""
        text = "\n".join(lines)
        if is_fatal:
            raise StallError(
                f"{text}\n(limit: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={self._limit_s:g})\n"
                "Call the operation on all ranks, not inside `if hvd.rank() == 0:`; or raise the limit for slow ranks"
            )
        logger.warning(text)


def _missing(item: Waiting) -> tuple[int, ...]:
    return tuple(item.missing)
