"""Watches the ranks of any kind of job: passes output and signals on, and ends the job when necessary.

One thread, one poll. Nothing here blocks on a rank or a terminal: in any state of theirs, an order to end the job
reaches the keeper at once. If the keeper does not follow it within 6 seconds, it is killed, which makes the kernel kill
the ranks. An elastic job with a folder for its state has more time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from horovod.errors import LaunchError
from horovod.launch.job import Job
from horovod.launch.local import SAFETY_S, more_grace_s
from horovod.launch.output import OutputSink
from horovod.launch.plan import LaunchPlan
from horovod.launch.report import Exit, Outcome, alone_text, trains_together
from horovod.launch.signals import handled
from horovod.launch.streams import RankStreams

__all__ = ["ALONE_S", "NO_ANSWER", "RankPlace", "Supervision"]

FAILURE_GRACE_S = 1.0
"""Time from the first failure to SIGTERM, in which the other ranks can report their errors."""
NO_ANSWER = "the process that watches the ranks does not answer"
"""Reason for the loss of a host if its keeper does not end its ranks."""
ALONE_S = 120.0
"""How long ranks may run without ``hvd.init()`` until the user is told; reading data before it may take a while."""
_IDLE_S = 0.1  # for prompts: idle time until a terminal shows the beginning of a line


class RankPlace(NamedTuple):
    """Where a rank runs: in a slot of a host."""

    job: Job
    slot: int


class Supervision:
    """Watches the ranks of a job. A *rank* is here the number of a process, which is unique in the job."""

    def __init__(self, plan: LaunchPlan, sinks: tuple[OutputSink, OutputSink]) -> None:
        self.outcome = Outcome()
        self.plan = plan
        self.places: dict[int, RankPlace] = {}
        self._console = sinks
        self._jobs: list[Job] = []
        self._running: dict[int, Job] = {}
        self.poll = select.poll()
        self.streams = RankStreams(sinks, self.poll, plan)
        self._wake, self._wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._term_at: float | None = None  # when to end the others
        self.kill_at: float | None = None  # when to kill them
        self._dead_at: float | None = None  # when to stop trusting the keeper
        self.failed_at: float | None = None  # when the first rank failed
        self._over = False
        self._alone_at: float | None = None
        self._notice = ""  # for the user; signal handlers print nothing themselves
        self._passing = ""  # name of the signal passed on last
        self._passed_on: list[list[int]] = []  # ranks that got it, on each host that has answered

    def carry_out(self, signals: Sequence[signal.Signals], stdin: int | None) -> Outcome:
        """Run the job to its end, and return how every rank ended; no process of it is left. Rank 0, if it runs on this
        host, gets ``stdin``, as ``subprocess`` takes it. The signals to this process end the job, stop it, or are
        passed on; only on the main thread.

        Raises:
            LaunchError: the job could not be started, or an output file could not be opened.

        Blocks until the job has ended.
        """
        with handled(signals, self.signal):
            try:
                self.poll.register(self._wake, select.POLLIN)
                self.start(stdin)
                self.run()
            finally:
                self.close()
        return self.outcome

    def start(self, stdin: int | None) -> None:
        """Start the job."""
        raise NotImplementedError

    def rank_of(self, process: int) -> int | None:
        """Return the rank, as users know it, of a process that was started as this one; None if it never had one."""
        return process

    def on_exit(self, ended: Exit) -> None:
        """Handle the end of a rank."""
        raise NotImplementedError

    def on_stopped(self, rank: int) -> None:
        """Handle the kill of a stopped rank; its end follows."""

    def on_lost(self, job: Job, reason: str) -> None:
        """Handle the loss of a host; processes that may still run there have been killed."""
        raise NotImplementedError

    def is_final(self) -> bool:
        """Whether the job is over as soon as nothing is left to watch."""
        return True

    def expect_init(self, size: int) -> None:
        """Name the ranks later that have not called ``hvd.init()``, if the command of a job of this size should."""
        if trains_together(self.plan.command, size):
            self._alone_at = time.monotonic() + ALONE_S

    def on_poll(self) -> None:
        """Do the work that is due, after an event or when ``due_at`` has come."""
        if self._alone_at is None or time.monotonic() < self._alone_at:
            return
        self._alone_at = None
        ended = self.outcome.lost.keys() | {e.rank for e in self.outcome.exits}
        running = [rank for rank in self.places if rank not in ended]
        alone = [rank for rank in running if not self.places[rank].job.has_begun(rank)]
        # The plan of an elastic job names no rank, and new processes have had less time.
        if alone and (self.plan.size or alone == running):
            self.say(alone_text(alone, self.plan.size or len(alone), f" in {ALONE_S:g} seconds"))

    def due_at(self) -> list[float]:
        """Return the times at which ``on_poll`` must run even without an event."""
        return [] if self._alone_at is None else [self._alone_at]

    def add_job(self, job: Job, stdin: int | None) -> None:
        """Watch a host from now on; its rank 0 gets ``stdin``, as ``subprocess`` takes it.

        Raises:
            LaunchError: no rank can be started there.
        """
        if job not in self._jobs:
            self._jobs.append(job)
        job.start(stdin)
        self._running[job.fileno()] = job
        self.poll.register(job, select.POLLIN)

    def start_rank(self, rank: int, place: RankPlace, environ: Mapping[str, str], label: str, folder: str = "") -> None:
        """Start a rank. See ``RankStreams.open`` for label and folder.

        Raises:
            LaunchError: its output cannot be opened.
        """
        job = place.job
        try:
            output = self.streams.open(rank, label, folder, pipes=job.has_pipes)
        except OSError as error:
            hint = "; lower -np, or raise the limit (ulimit -n)" if error.errno == errno.EMFILE else ""
            raise LaunchError(f"cannot open the output of the ranks: {error}{hint}") from error
        self.places[rank] = place
        job.start_rank(rank, place.slot, environ, output)

    def signal(self, number: int) -> None:
        """Handle a signal: pass it on, or end the job, or kill it the second time. Runs inside the signal handler."""
        if number == signal.SIGTSTP:
            self._tell(b"S")
            os.kill(os.getpid(), signal.SIGSTOP)
            self._tell(b"C")
            return
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            self._passing = signal.Signals(number).name
            self._tell(b"U" if number == signal.SIGUSR1 else b"V")
            return
        self.end(b"K" if self.outcome.interrupted else b"T")
        self.outcome.interrupted = self.outcome.interrupted or number
        self.wake()

    def wake(self) -> None:
        """Make ``on_poll`` run soon; safe in a signal handler, and from other threads."""
        with contextlib.suppress(OSError):  # full, or closed
            os.write(self._wake_end, b"!")

    def _tell(self, order: bytes) -> None:
        for job in tuple(self._running.values()):
            job.tell(order)

    def end(self, order: bytes) -> None:
        """End all ranks, with order ``T`` or ``K``."""
        self._tell(order)
        self._term_at = None
        more_s = more_grace_s(self.plan.environ) if order == b"T" else 0.0
        if more_s:
            self._notice = f"the ranks may take {more_s:g} s to complete their step and write their state"
        dead_at = time.monotonic() + SAFETY_S + more_s
        self._dead_at = min(self._dead_at or dead_at, dead_at)
        self._over |= not self._running

    def end_soon(self) -> None:
        """End all ranks, after they have had time to report."""
        if self._dead_at is None and self._term_at is None:
            self.failed_at = time.monotonic()
            self._term_at = self.failed_at + FAILURE_GRACE_S

    def run(self) -> None:
        """Watch the job until the keepers report that no process is left."""
        while not self._over:
            self._step()
            self.on_poll()
            if self._notice:
                self.say(self._notice)
                self._notice = ""
            now = time.monotonic()
            if self._term_at is not None and now >= self._term_at:
                self.end(b"T")
            if self.kill_at is not None and now >= self.kill_at:
                self.kill_at = None
                self._tell(b"K")
            self.streams.let_go(now)
            for job in tuple(self._running.values()):
                job.tend()
                for event in job.silence():
                    self._learn(job, event)
                if self._dead_at is not None and now >= self._dead_at and job.fileno() in self._running:
                    self._abandon(job, NO_ANSWER)
        self.streams.finish()
        for line in self.streams.tracebacks.summary(self.rank_of):
            self.say(line)
        self._flush()

    def _step(self) -> None:
        """Wait for events and handle them."""
        streams = self.streams
        is_held_up = streams.is_held_up
        writing = [s.fileno() for s in streams.sinks if s.backlog]
        writing += [job.outgoing for job in self._running.values() if job.outgoing >= 0]
        prompts = streams.prompts()
        for fd in writing:
            self.poll.register(fd, select.POLLOUT)
        for fd in streams.pipes if is_held_up else ():  # the ranks wait until the sink has caught up
            self.poll.unregister(fd)
        events = self.poll.poll(self._timeout_ms(idle=bool(prompts)))
        for fd in streams.pipes if is_held_up else ():
            self.poll.register(fd, select.POLLIN)
        for fd in writing:
            self.poll.unregister(fd)
        for sink in streams.sinks:
            sink.flush()
        for job in self._running.values():
            job.flush()
            if not is_held_up:
                job.take()
        for fd, _ in events:
            if fd in streams.pipes:
                if not streams.read(fd):
                    streams.drop(fd)
            elif fd in self._running:
                job = self._running[fd]
                for event in job.news():
                    self._learn(job, event)
            elif fd == self._wake:
                os.read(self._wake, 64)
        for stream in prompts if not events else ():
            stream.show_partial()

    def _timeout_ms(self, idle: bool) -> float | None:
        ends = (self._term_at, self.kill_at, self._dead_at)
        times = [t for t in (*ends, *self.streams.held_until(), *self.due_at()) if t is not None]
        times += [job.due_at for job in self._running.values() if job.due_at is not None]
        times += [time.monotonic() + _IDLE_S] if idle else []
        return max(0.0, min(times) - time.monotonic()) * 1000 + 1 if times else None

    def _flush(self) -> None:
        """Wait for the reader of our output, at the end; after an interrupt, only briefly."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 64)
        while waiting := [s for s in self.streams.sinks if s.backlog]:
            poll = select.poll()
            for sink in waiting:
                poll.register(sink.fileno(), select.POLLOUT)
            poll.register(self._wake, select.POLLIN)
            ready = poll.poll(200 if self.outcome.interrupted else None)
            if not ready or any(fd == self._wake for fd, _ in ready):
                return
            for sink in waiting:
                sink.flush()

    def _learn(self, job: Job, event: dict[str, Any]) -> None:
        """Handle one event from a host."""
        if "output" in event:
            if not self.streams.feed(event["output"], event["data"]):
                job.refuse(*event["output"])  # so that the rank gets a broken pipe, as if it wrote there itself
        elif "ended" in event:
            rank, pid, status, sent, has_begun = (
                event[name] for name in ("ended", "pid", "status", "sent", "has_begun")
            )
            ended = Exit(rank, pid, status, sent, has_begun, event.get("how", ""))
            self.outcome.exits.append(ended)
            self.on_exit(ended)
        elif "stopped" in event:
            self.on_stopped(event["stopped"])
        elif "passed_on" in event:
            self._passed_on.append(event["passed_on"])
            if len(self._passed_on) >= len(self._running):
                if not any(self._passed_on):
                    when = " before hvd.init(), or after its end" * (self._passing == "SIGUSR1")
                    self.say(f"{self._passing} was not passed on: no rank handles it{when}")
                self._passed_on.clear()
        elif "error" in event:
            where = "" if len(self._jobs) == 1 else f" on {job.host}"
            self.outcome.error = f"the ranks could not all be started{where}: {event['error']}"
        elif "done" in event:
            self._leave(job)
        elif job.fileno() in self._running:
            self._abandon(job, event["lost"])

    def _leave(self, job: Job) -> None:
        fd = job.fileno()
        if self._running.pop(fd, None) is not None:
            self.poll.unregister(fd)
        self._over |= not self._running and self.is_final()

    def say(self, line: str) -> None:
        """Print a line of our own."""
        sink = self._console[1]
        sink.end_line()
        sink.put(f"{self.plan.display.launcher}: {line}\n".encode())

    def _abandon(self, job: Job, reason: str) -> None:
        """Give up a host: kill the processes that may still run there."""
        job.kill()
        self._leave(job)
        self.on_lost(job, reason)

    def close(self) -> None:
        """Release everything; if ranks still run, this kills them."""
        for job in self._jobs:
            job.hang_up()
        for job in self._jobs:
            job.close()
        self.streams.close()
        wake_end, self._wake_end = self._wake_end, -1
        os.close(self._wake)
        os.close(wake_end)
