"""Watches an engine: stall reports, the flight recorder, the timeline, answers to other ranks' questions.

The engine reports events to the observer, and asks it now and then to look for stalls.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from horovod.config import Config
from horovod.engine.board import Query
from horovod.engine.engine import Engine
from horovod.engine.ports import Observer
from horovod.engine.times import ENDED, REQUEST, SEQUENCE, STARTED, now
from horovod.errors import HorovodInternalError, InitError
from horovod.observe import announce
from horovod.observe.queries import Queries, RankStatus, current_status
from horovod.observe.recorder import Recorder, Trigger
from horovod.observe.stalls import StallWatch
from horovod.observe.status import StatusReports
from horovod.observe.tracer import Tracer
from horovod.phrases import printable
from horovod.timeline.dumps import SCRIPT_ENDED, check_folder

if TYPE_CHECKING:
    from horovod.observe.metrics import MetricsExport

__all__ = ["JobObserver"]

#: A dump this fresh is not written again when another rank asks.
_FRESH_NS = 1_000_000_000
#: The largest share of a thread's time for inspections, and the longest pause between two, in seconds.
_SHARE, _MOST_S = 1 / 16, 2.0


class JobObserver(Observer):
    """See the module, and ``horovod.engine.ports.Observer``."""

    tracer: Tracer  # makes the timeline

    def __init__(self, config: Config, job: str) -> None:
        self._config, self._job = config, job
        self._signalled_ns = -_FRESH_NS
        self._queries: Queries | None = None
        self._stalls: StallWatch | None = None
        self._due_s = 0.0
        self._metrics: MetricsExport | None = None

    def begin(self, subject: Engine) -> None:
        link, config = subject.link, self._config
        generation, board, peers = link.generation, link.board, link.peers
        self._subject, self._sets = subject, generation.sets
        self._others = [other for other in range(generation.size) if other != link.rank]
        self._recorder = Recorder(subject, config.flight_recorder_dir, self._job, self._describe, self._members)
        self._trigger = Trigger(self._dump_everywhere)
        self.tracer = Tracer(subject, self._members)
        if board is not None and peers is not None:
            self._queries = Queries(board, self._describe, self._fulfil)
            reports = StatusReports(self._queries, generation, peers)
            self._stalls = StallWatch(config, link.rank, generation.size, reports, self._recorder.after_failure)

    def start(self) -> None:
        announce.started(self._config, self._job, self._subject.link)
        self._trigger.set()

    def record(self, before: JobObserver | None, number: int) -> None:
        """Begin the recording that HOROVOD_TIMELINE names, or continue that of an earlier generation of an elastic job.
        ``number`` counts the times that the ranks of the job have met.

        Raises:
            InitError: the file cannot be written, or HOROVOD_FLIGHT_RECORDER_DIR is a folder that others can write to.
        """
        folder = self._config.flight_recorder_dir
        if before is None and folder and Path(folder).is_dir():
            try:
                check_folder(Path(folder))
            except PermissionError as error:
                raise InitError(f"HOROVOD_FLIGHT_RECORDER_DIR={folder}: {error.strerror}") from None
        self._metrics = self._export()
        name = self._config.timeline
        # Horovod's value DYNAMIC announces a call of start_timeline(). Here it may always be called.
        of_job = (Path(name), self._config.timeline_mark_cycles) if name and name.upper() != "DYNAMIC" else None
        wanted = of_job if before is None else before.tracer.wanted
        try:
            if number > 1:
                self.tracer.go_on(wanted)
            elif wanted is not None:
                self.tracer.start(*wanted)
        except OSError as error:
            named = "HOROVOD_TIMELINE=" if before is None else "the timeline "
            raise InitError(f"{named}{wanted and wanted[0]} cannot be written: {error.strerror}") from None

    def _export(self) -> MetricsExport | None:
        config = self._config
        if not (config.metrics_filename or config.metrics_port):
            return None
        from horovod.observe.metrics import MetricsExport, render  # loads an HTTP server

        subject, link = self._subject, self._subject.link
        generation, rank = link.generation, link.rank
        labels = {"job": printable(self._job), "rank": str(rank), "host": generation.members[rank].host}
        local_rank = next((ranks.index(rank) for ranks in generation.hosts if rank in ranks), 0)
        return MetricsExport(
            config, rank, local_rank, generation.size, lambda: render(subject.stats(), labels, generation.size)
        )

    @property
    def is_busy(self) -> bool:
        return self._stalls is not None and self._stalls.is_busy

    def attend(self) -> None:
        if self._queries is not None:
            self._queries.attend()

    def tick(self) -> None:
        self.attend()
        if self._stalls is None or not (self._stalls.is_busy or time.monotonic() >= self._due_s):
            return
        began_s = time.thread_time()  # of the processor: waiting for one is not work
        if (coordinator := self._subject.link.coordinator) is not None:
            self._stalls.inspect(coordinator, self._subject.position)
        else:
            self._stalls.check_coordinator(self._subject.in_flight())
        self._due_s = time.monotonic() + min((time.thread_time() - began_s) / _SHARE, _MOST_S)

    def in_execution(self, rank: int, waited_s: float) -> None:
        self.attend()
        if self._stalls is not None:
            latest = reversed(list(self._subject.ring))
            record = next((one for one in latest if one[STARTED] and not one[ENDED]), None)
            request, sequence = (record[REQUEST], record[SEQUENCE]) if record is not None else (None, 0)
            self._stalls.check_execution(rank, waited_s, request, sequence)

    def failed(self, failure: HorovodInternalError) -> None:
        self._recorder.after_failure(type(failure).__name__)

    def script_failed(self, text: str) -> None:
        """Write a dump when an exception ends this rank's script; ``text`` is its traceback."""
        if self._subject.failure is None:
            self._recorder.after_failure(SCRIPT_ENDED, text.rstrip("\n"))

    def stop(self) -> None:
        self._trigger.unset()
        if self._metrics is not None:
            self._metrics.close()

    def conclude(self) -> None:
        self.tracer.close()

    def close(self) -> None:
        self._queries = self._stalls = None

    def _describe(self) -> RankStatus:
        return current_status(self._subject, self._members)

    def _members(self, process_set: int) -> tuple[int, ...]:
        return self._sets.members(process_set) if process_set in self._sets else ()

    def _fulfil(self, wanted: int, asker: int) -> None:
        if wanted & Query.TRACE:
            self.tracer.follow()
        if wanted & Query.DUMP:
            # horovodrun signals every rank, and each rank asks all others: one dump is enough.
            if now() - self._signalled_ns > _FRESH_NS:
                self._recorder.as_asked(f"rank {asker} asked for it")
        elif wanted & Query.DUMP_IF_SET and self._subject.failure is None:
            self._recorder.after_failure(f"rank {asker} reported a stall")

    def _dump_everywhere(self) -> None:
        """Write a dump, ask others for theirs. Runs in a signal handler: takes no lock, bypasses output buffers."""
        path = self._recorder.as_asked("SIGUSR1")
        self._signalled_ns = now()
        if path is not None:
            text = f"horovod: the flight recorder wrote {path}; read it with horovodrun --doctor {path.parent}\n"
            os.write(2, text.encode(errors="surrogateescape"))
        if self._queries is not None:
            self._queries.ask(self._others, Query.DUMP)
