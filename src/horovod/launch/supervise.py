"""Carries out a ``LaunchPlan``: a job of fixed size, which ends with the first failure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from horovod.launch.job import Job
from horovod.launch.output import OutputSink
from horovod.launch.plan import LaunchPlan
from horovod.launch.report import Exit
from horovod.launch.supervision import NO_ANSWER, RankPlace, Supervision
from horovod.phrases import list_ranks
from horovod.rendezvous.endings import how_ended

__all__ = ["FixedJob"]

LOST_GRACE_S = 1.0
"""From SIGTERM to SIGKILL, for the ranks of other hosts when one is lost."""
_CONSEQUENCE_S = 10.0
"""If a rank fails at most this long before a host is known to be lost, the host is the cause."""


class FixedJob(Supervision):
    """A job whose ranks are all started at the beginning, and that ends with the first failure. ``on_end`` is called
    with an ended rank's number, its description and how it ended.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        sinks: tuple[OutputSink, OutputSink],
        jobs: Sequence[Job],
        on_end: Callable[[int, str, str], None] = lambda rank, who, how: None,
    ) -> None:
        super().__init__(plan, sinks)
        self._jobs += jobs
        self._on_end = on_end

    def start(self, stdin: int | None) -> None:
        plan = self.plan
        is_labelled = plan.size > 1 or plan.timestamps or plan.display.is_always
        for (first, part), job in zip(plan.parts(), tuple(self._jobs), strict=True):
            self.add_job(job, stdin)
            for slot, environ in enumerate(part.ranks):
                rank = first + slot
                label = plan.display.label.format(rank=rank, stream="{stream}") if is_labelled else ""
                folder = plan.output_dirs[rank] if plan.output_dirs else ""
                self.start_rank(rank, RankPlace(job, slot), environ, label, folder)
            job.finish()
        self.expect_init(plan.size)

    def run(self) -> None:
        super().run()
        seen = self.streams.tracebacks.only()  # right above the report
        self.outcome.tails = {rank: self.streams.tail(rank) for rank in self.places if rank not in seen}

    def on_exit(self, ended: Exit) -> None:
        who = f"rank {ended.rank} (pid {ended.pid}) on host {self.places[ended.rank].job.host}"
        self._on_end(ended.rank, who, how_ended(ended.status))
        if ended.status != 0:
            self.end_soon()

    def on_lost(self, job: Job, reason: str) -> None:
        own = [rank for rank, place in self.places.items() if place.job is job]
        failed_s = math.inf if self.failed_at is None else time.monotonic() - self.failed_at
        if failed_s < _CONSEQUENCE_S and reason != NO_ANSWER:
            # Ranks notice the loss of a host before its agent, or its silence, reveals it to us.
            self.outcome.excused.update(e.rank for e in self.outcome.exits if e.status > 0 and e.rank not in own)
        if len(self._jobs) > 1 or self.plan.counts:
            place = self.plan.display.place
            place = f"{place} {job.host}" if place == "host" else f"the {place} on host {job.host}"
            ended = {e.rank for e in self.outcome.exits}
            ranks = [rank for rank in own if rank not in ended]
            self.outcome.lost.update(dict.fromkeys(ranks, job.host))
            for rank in ranks:
                self._on_end(rank, f"rank {rank}", f"was lost with {place} ({reason})")
            what = f"with {list_ranks(ranks)}" if ranks else "after its ranks had ended"
            reason = f"{place} was lost {what}: {reason}"
        if self.outcome.first_failure is None:
            self.outcome.error = self.outcome.error or reason
        if self._running and not self.outcome.interrupted:
            # Wait for less time than after a rank's failure: the silence has lasted some seconds already.
            self.end(b"T")
            self.kill_at = self.kill_at or time.monotonic() + LOST_GRACE_S
