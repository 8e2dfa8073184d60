"""Carries out a ``LaunchPlan``: passes output on, and decides when the job is over.

One thread, one poll. Nothing here blocks on anything that a rank or a terminal could hold up: whatever state they are
in, an order to end the job reaches the keeper at once, and should the keeper not follow it within 6 seconds, it is
killed, which makes the kernel kill the ranks.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from horovod.errors import LaunchError
from horovod.launch.job import Job
from horovod.launch.local import SAFETY_S, LocalJob
from horovod.launch.outcome import Exit, Outcome
from horovod.launch.output import OutputSink
from horovod.launch.plan import LaunchPlan
from horovod.launch.signals import handled
from horovod.launch.streams import Streams
from horovod.phrases import list_ranks
from horovod.rendezvous.endings import signal_name

__all__ = ["Place", "Supervision", "how_ended", "supervise"]

FAILURE_GRACE_S = 1.0
"""From the first failure to SIGTERM, so that the others can report what it means to them."""
LOST_GRACE_S = 1.0
"""From SIGTERM to SIGKILL, for the ranks of other hosts when one is lost."""
_CONSEQUENCE_S = 10.0
"""A rank that fails this long before another host is known to be lost, at most, failed because of it."""
_NO_ANSWER = "the process that watches the ranks does not answer"
_IDLE_S = 0.1  # the beginning of a line is shown on a terminal after so long, for prompts


def supervise(
    plan: LaunchPlan,
    sinks: tuple[OutputSink, OutputSink],
    *,
    signals: Sequence[signal.Signals] = (),
    stdin: int | None = None,
    jobs: Sequence[Job] = (),
    on_end: Callable[[int, str, str], None] = lambda rank, who, how: None,
) -> Outcome:
    """Run the job to its end.

    Args:
        plan: what to start.
        sinks: where standard output and standard error of the ranks go.
        signals: signals to this process that end the job, stop it, or are passed on; only heeded on the main thread.
        stdin: standard input of rank 0, as ``subprocess`` takes it, if rank 0 runs on this host.
        jobs: the ranks of each host, in rank order; all on this host when empty.
        on_end: is told when a rank has ended: its number, the same in words, and how.

    Returns:
        How every rank ended. No process of the job is left.

    Raises:
        LaunchError: the job could not be started, or an output file could not be opened.

    Blocks until the job has ended.
    """
    return _FixedJob(plan, sinks, list(jobs) or [LocalJob(plan)], on_end).carry_out(signals, stdin)


def how_ended(status: int) -> str:
    """Say how a process ended: its exit code, or the signal that killed it."""
    return f"ended with exit code {status}" if status >= 0 else f"was killed by {signal_name(-status)}"


class Place(NamedTuple):
    """Where a rank runs: in a slot of a host."""

    job: Job
    slot: int


class Supervision:
    """Watches the ranks of a job. A *rank* is the number of a process here, which no other process of the job gets.

    Args:
        plan: what to start.
        sinks: where standard output and standard error of the ranks go.
    """

    def __init__(self, plan: LaunchPlan, sinks: tuple[OutputSink, OutputSink]) -> None:
        self.outcome = Outcome()
        self.plan = plan
        self.places: dict[int, Place] = {}
        self._console = sinks
        self._jobs: list[Job] = []
        self._running: dict[int, Job] = {}
        self._poll = select.poll()
        self.streams = Streams(sinks, self._poll, plan.display, plan.environ, plan.timestamps)
        self._wake, self._wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._term_at: float | None = None  # when to end the others
        self._kill_at: float | None = None  # when to kill them
        self._dead_at: float | None = None  # when to stop trusting the keeper
        self._failed_at: float | None = None  # when the first rank failed
        self._over = False
        self._passed_on: list[list[int]] = []

    def carry_out(self, signals: Sequence[signal.Signals], stdin: int | None) -> Outcome:
        """Run the job to its end; see ``supervise``."""
        try:
            with handled(signals, self.signal):
                self._poll.register(self._wake, select.POLLIN)
                self.start(stdin)
                self.run()
        finally:
            self.close()
        return self.outcome

    def start(self, stdin: int | None) -> None:
        """Start what runs from the beginning."""
        raise NotImplementedError

    def on_exit(self, ended: Exit) -> None:
        """A rank has ended."""
        raise NotImplementedError

    def on_lost(self, job: Job, reason: str) -> None:
        """Nobody answers for a host any more; what may still run there has been killed."""
        raise NotImplementedError

    def on_poll(self) -> None:
        """Something has happened, or ``due_at`` is over."""

    def due_at(self) -> Sequence[float]:
        """When ``on_poll`` is to be called, if nothing happens before."""
        return ()

    def add_job(self, job: Job, stdin: int | None) -> None:
        """Watch a host from now on.

        Args:
            job: its ranks.
            stdin: standard input of rank 0, as ``subprocess`` takes it.

        Raises:
            LaunchError: no rank can be started there.
        """
        if job not in self._jobs:
            self._jobs.append(job)
        job.start(stdin)
        self._running[job.fileno()] = job
        self._poll.register(job, select.POLLIN)

    def start_rank(self, rank: int, place: Place, environ: Mapping[str, str], label: str, folder: str = "") -> None:
        """Start a rank.

        Args:
            rank: its number.
            place: where.
            environ: its own variables.
            label: stands before each line of its output, see ``Streams.open``.
            folder: where its output goes, too; empty for nowhere.

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
        """A signal arrived: pass it on, or end the job, or the second time kill it. Runs inside the signal handler."""
        if number == signal.SIGTSTP:
            self._tell(b"S")
            os.kill(os.getpid(), signal.SIGSTOP)
            self._tell(b"C")
            return
        if number == signal.SIGUSR1:
            self._tell(b"U")
            return
        self.end(b"K" if self.outcome.interrupted else b"T")
        self.outcome.interrupted = self.outcome.interrupted or number
        self.wake()

    def wake(self) -> None:
        """Have ``on_poll`` called soon; safe in a signal handler, and from other threads."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_end, b"!")

    def _tell(self, order: bytes) -> None:
        for job in tuple(self._running.values()):
            job.tell(order)

    def end(self, order: bytes) -> None:
        """Have all ranks ended, with ``T`` or ``K``."""
        self._tell(order)
        self._term_at = None
        self._dead_at = self._dead_at or time.monotonic() + SAFETY_S

    def end_soon(self) -> None:
        """Have all ranks ended, when they have had the time to report."""
        if self._dead_at is None and self._term_at is None:
            self._failed_at = time.monotonic()
            self._term_at = self._failed_at + FAILURE_GRACE_S

    def run(self) -> None:
        """Until the keeper says that nothing is left."""
        while not self._over:
            self._step()
            self.on_poll()
            now = time.monotonic()
            if self._term_at is not None and now >= self._term_at:
                self.end(b"T")
            if self._kill_at is not None and now >= self._kill_at:
                self._kill_at = None
                self._tell(b"K")
            self.streams.let_go(now)
            for job in tuple(self._running.values()):
                job.tend()
                for event in job.silence():
                    self._learn(job, event)
                if self._dead_at is not None and now >= self._dead_at and job.fileno() in self._running:
                    self._abandon(job, _NO_ANSWER)
        self.streams.finish()
        for line in self.streams.tracebacks.summary():
            self.say(line)
        self._flush()

    def _step(self) -> None:
        """Wait for one thing to happen and deal with it."""
        streams = self.streams
        is_held_up = streams.is_held_up
        writing = [s.fileno() for s in streams.sinks if s.backlog]
        writing += [job.outgoing for job in self._running.values() if job.outgoing >= 0]
        prompts = streams.prompts()
        for fd in writing:
            self._poll.register(fd, select.POLLOUT)
        for fd in streams.pipes if is_held_up else ():  # the ranks wait until the sink has caught up
            self._poll.unregister(fd)
        events = self._poll.poll(self._timeout_ms(idle=bool(prompts)))
        for fd in streams.pipes if is_held_up else ():
            self._poll.register(fd, select.POLLIN)
        for fd in writing:
            self._poll.unregister(fd)
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
        ends = (self._term_at, self._kill_at, self._dead_at)
        times = [t for t in (*ends, *self.streams.held_until(), *self.due_at()) if t is not None]
        times += [job.due_at for job in self._running.values() if job.due_at is not None]
        times += [time.monotonic() + _IDLE_S] if idle else []
        return max(0.0, min(times) - time.monotonic()) * 1000 + 1 if times else None

    def _flush(self) -> None:
        """At the end, wait for the reader of our output; after an interrupt, not for long."""
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
        """Take one piece of news from a host."""
        if "output" in event:
            if not self.streams.feed(event["output"], event["data"]):
                job.refuse(*event["output"])  # so that the rank gets a broken pipe, as if it wrote there itself
        elif "ended" in event:
            ended = Exit(event["ended"], event["pid"], event["status"], event["sent"])
            self.outcome.exits.append(ended)
            self.on_exit(ended)
        elif "passed_on" in event:
            self._passed_on.append(event["passed_on"])
            if len(self._passed_on) >= len(self._running):
                if not any(self._passed_on):
                    self.say("SIGUSR1 was not passed on: no rank handles it before hvd.init(), or after its end")
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
            self._poll.unregister(fd)
        self._over = not self._running

    def say(self, line: str) -> None:
        """Print a line of our own."""
        sink = self._console[1]
        sink.end_line()
        sink.put(f"{self.plan.display.launcher}: {line}\n".encode())

    def _abandon(self, job: Job, reason: str) -> None:
        """Nothing more is to be had from a host: what may still run there is killed."""
        job.kill()
        self._leave(job)
        self.on_lost(job, reason)

    def close(self) -> None:
        """Give everything back; if ranks still run, this kills them."""
        for job in self._jobs:
            job.hang_up()
        for job in self._jobs:
            job.close()
        self.streams.close()
        os.close(self._wake)
        os.close(self._wake_end)


class _FixedJob(Supervision):
    """A job whose ranks are all started at the beginning, and that ends with the first failure."""

    def __init__(
        self,
        plan: LaunchPlan,
        sinks: tuple[OutputSink, OutputSink],
        jobs: Sequence[Job],
        on_end: Callable[[int, str, str], None],
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
                self.start_rank(rank, Place(job, slot), environ, label, folder)
            job.finish()

    def run(self) -> None:
        super().run()
        self.outcome.tails = {rank: self.streams.tail(rank) for rank in self.places}

    def on_exit(self, ended: Exit) -> None:
        who = f"rank {ended.rank} (pid {ended.pid}) on host {self.places[ended.rank].job.host}"
        self._on_end(ended.rank, who, how_ended(ended.status))
        if ended.status != 0:
            self.end_soon()

    def on_lost(self, job: Job, reason: str) -> None:
        own = [rank for rank, place in self.places.items() if place.job is job]
        failed_s = math.inf if self._failed_at is None else time.monotonic() - self._failed_at
        if failed_s < _CONSEQUENCE_S and reason != _NO_ANSWER:
            # Ranks notice the loss of a host before its agent, or the silence, tells us.
            self.outcome.excused.update(e.rank for e in self.outcome.exits if e.status > 0 and e.rank not in own)
        if len(self._jobs) > 1:
            ended = {e.rank for e in self.outcome.exits}
            ranks = [rank for rank in own if rank not in ended]
            self.outcome.lost.update(dict.fromkeys(ranks, job.host))
            for rank in ranks:
                self._on_end(rank, f"rank {rank}", f"was lost with host {job.host} ({reason})")
            what = f"with {list_ranks(ranks)}" if ranks else "after its ranks had ended"
            reason = f"host {job.host} was lost {what}: {reason}"
        if self.outcome.first_failure is None:
            self.outcome.error = self.outcome.error or reason
        if self._running and not self.outcome.interrupted:
            # Less patience than after a rank's failure: silence has taken its time already.
            self.end(b"T")
            self._kill_at = self._kill_at or time.monotonic() + LOST_GRACE_S
