"""Carries out a ``LaunchPlan``: passes output on, and decides when the job is over.

One thread, one poll. Nothing here blocks on anything that a rank or a terminal could hold up: whatever state they are
in, an order to end the job reaches the keeper at once, and should the keeper not follow it within 6 seconds, it is
killed, which makes the kernel kill the ranks.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from horovod.errors import LaunchError
from horovod.files import create_file
from horovod.launch.job import Job
from horovod.launch.local import SAFETY_S, LocalJob
from horovod.launch.outcome import Exit, Outcome
from horovod.launch.output import NullSink, OutputSink, RankStream
from horovod.launch.plan import LaunchPlan
from horovod.launch.repeats import Tracebacks
from horovod.launch.signals import handled
from horovod.phrases import list_ranks
from horovod.rendezvous.endings import signal_name

__all__ = ["supervise"]

FAILURE_GRACE_S = 1.0
"""From the first failure to SIGTERM, so that the others can report what it means to them."""
LOST_GRACE_S = 1.0
"""From SIGTERM to SIGKILL, for the ranks of other hosts when one is lost."""
TAIL_LINES = 20
_CONSEQUENCE_S = 10.0
"""A rank that fails this long before another host is known to be lost, at most, failed because of it."""
_IDLE_S = 0.1  # the beginning of a line is shown on a terminal after so long, for prompts
_READ_BYTES = 1 << 16


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
    supervision = _Supervision(plan, sinks, list(jobs) or [LocalJob(plan)], on_end)
    try:
        with handled(signals, supervision.signal):
            supervision.start(stdin)
            supervision.run()
    finally:
        supervision.close()
    return supervision.outcome


class _Supervision:
    def __init__(
        self,
        plan: LaunchPlan,
        sinks: tuple[OutputSink, OutputSink],
        jobs: list[Job],
        on_end: Callable[[int, str, str], None],
    ) -> None:
        self._on_end = on_end
        self.outcome = Outcome(pids=[0] * plan.size)
        self._plan = plan
        self._console = sinks
        self._sinks = list(dict.fromkeys(sinks))
        self._jobs = jobs
        self._running = {job.fileno(): job for job in jobs}
        self._streams: dict[int, RankStream] = {}  # by the end of the pipe that we read
        self._far: dict[tuple[int, str], RankStream] = {}  # what comes with the news of other hosts
        self._stderr: list[RankStream] = []
        self._hidden: dict[int, RankStream] = {}  # standard output that nobody has seen
        self._tracebacks = Tracebacks()
        self._poll = select.poll()
        self._wake, self._wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._term_at: float | None = None  # when to end the others
        self._kill_at: float | None = None  # when to kill them
        self._dead_at: float | None = None  # when to stop trusting the keeper
        self._failed_at: float | None = None  # when the first rank failed
        self._over = False
        self._passed_on: list[list[int]] = []

    def start(self, stdin: int | None) -> None:
        for job in self._jobs:
            theirs: list[int] = []
            try:
                for rank in range(job.first, job.first + job.size):
                    for name in ("stdout", "stderr"):
                        stream = self._open_stream(rank, name)
                        if job.has_pipes:
                            theirs.append(self._open_pipe(stream))
                        else:
                            self._far[rank, name] = stream
                job.start(list(zip(theirs[::2], theirs[1::2], strict=True)), stdin)
            except OSError as error:
                hint = "; lower -np, or raise the limit (ulimit -n)" if error.errno == errno.EMFILE else ""
                raise LaunchError(f"cannot open the output of the ranks: {error}{hint}") from error
            finally:
                for fd in theirs:
                    os.close(fd)
            self._poll.register(job, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def _open_stream(self, rank: int, name: str) -> RankStream:
        file: BinaryIO | None = None
        if self._plan.output_dirs:
            file = open(create_file(Path(self._plan.output_dirs[rank], name)), "wb", buffering=0)  # noqa: SIM115 - closed by the stream
        display = self._plan.display
        is_labelled = self._plan.size > 1 or self._plan.timestamps or display.is_always
        label = display.label.format(rank=rank, stream=name) if is_labelled else ""
        stream = RankStream(
            NullSink() if rank in display.hidden else self._console[name == "stderr"],
            label, file, time.ctime if self._plan.timestamps else None,
            functools.partial(self._tracebacks.is_repeat, rank) if label and name == "stderr" else None,
            name == "stderr" and self._plan.environ.get("TF_CPP_MIN_LOG_LEVEL", "0") != "0",
        )  # fmt: skip
        if name == "stderr":
            self._stderr.append(stream)
        elif rank in display.hidden:
            self._hidden[rank] = stream
        return stream

    def _open_pipe(self, stream: RankStream) -> int:
        end, their_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(end, False)
        self._streams[end] = stream
        self._poll.register(end, select.POLLIN)
        return their_end

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
        self._end(b"K" if self.outcome.interrupted else b"T")
        self.outcome.interrupted = self.outcome.interrupted or number
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_end, b"!")

    def _tell(self, order: bytes) -> None:
        for job in tuple(self._running.values()):
            job.tell(order)

    def _end(self, order: bytes) -> None:
        self._tell(order)
        self._term_at = None
        self._dead_at = self._dead_at or time.monotonic() + SAFETY_S

    def run(self) -> None:
        """Until the keeper says that nothing is left."""
        while not self._over:
            self._step()
            now = time.monotonic()
            if self._term_at is not None and now >= self._term_at:
                self._end(b"T")
            if self._kill_at is not None and now >= self._kill_at:
                self._kill_at = None
                self._tell(b"K")
            for stream in self._stderr:
                if stream.hold_until is not None and now >= stream.hold_until:
                    stream.let_go()
            for job in tuple(self._running.values()):
                job.tend()
                for event in job.silence():
                    self._learn(job, event)
                if self._dead_at is not None and now >= self._dead_at and job.fileno() in self._running:
                    self._abandon(job, "the process that watches the ranks does not answer")
        for fd in list(self._streams):
            while self._read(fd):
                pass
            self._drop(fd)
        for stream in self._far.values():
            stream.finish()
        for sink in self._sinks:
            sink.end_line()
        for line in self._tracebacks.summary():
            self._say(line)
        self._flush()
        for rank, stream in enumerate(self._stderr):
            lines = stream.last_lines(TAIL_LINES)
            if not lines and rank in self._hidden:
                lines = self._hidden[rank].last_lines(TAIL_LINES)
            self.outcome.tails[rank] = lines

    def _step(self) -> None:
        """Wait for one thing to happen and deal with it."""
        held_up = any(sink.full for sink in self._sinks)
        writing = [s.fileno() for s in self._sinks if s.backlog]
        writing += [job.outgoing for job in self._running.values() if job.outgoing >= 0]
        prompts = [s for s in (*self._streams.values(), *self._far.values()) if s.partial and s.sink.interactive]
        for fd in writing:
            self._poll.register(fd, select.POLLOUT)
        for fd in self._streams if held_up else ():  # the ranks wait until the sink has caught up
            self._poll.unregister(fd)
        events = self._poll.poll(self._timeout_ms(idle=bool(prompts)))
        for fd in self._streams if held_up else ():
            self._poll.register(fd, select.POLLIN)
        for fd in writing:
            self._poll.unregister(fd)
        for sink in self._sinks:
            sink.flush()
        for job in self._running.values():
            job.flush()
            if not held_up:
                job.take()
        for fd, _ in events:
            if fd in self._streams:
                if not self._read(fd):
                    self._drop(fd)
            elif fd in self._running:
                job = self._running[fd]
                for event in job.news():
                    self._learn(job, event)
            elif fd == self._wake:
                os.read(self._wake, 64)
        for stream in prompts if not events else ():
            stream.show_partial()

    def _timeout_ms(self, idle: bool) -> float | None:
        held = [stream.hold_until for stream in self._stderr]
        times = [t - time.monotonic() for t in (self._term_at, self._kill_at, self._dead_at, *held) if t is not None]
        times += [job.due_at - time.monotonic() for job in self._running.values() if job.due_at is not None]
        times += [_IDLE_S] if idle else []
        return max(0.0, min(times)) * 1000 + 1 if times else None

    def _flush(self) -> None:
        """At the end, wait for the reader of our output; after an interrupt, not for long."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 64)
        while waiting := [s for s in self._sinks if s.backlog]:
            poll = select.poll()
            for sink in waiting:
                poll.register(sink.fileno(), select.POLLOUT)
            poll.register(self._wake, select.POLLIN)
            ready = poll.poll(200 if self.outcome.interrupted else None)
            if not ready or any(fd == self._wake for fd, _ in ready):
                return
            for sink in waiting:
                sink.flush()

    def _read(self, fd: int) -> bool:
        """Pass on what there is; False at the end of the stream, and at the end of the job when there is no more."""
        stream = self._streams[fd]
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return not self._over
        if data:
            stream.feed(data)
        return bool(data) and stream.wanted  # else the rank gets a broken pipe, as if it wrote there itself

    def _drop(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._streams.pop(fd).finish()
        os.close(fd)

    def _learn(self, job: Job, event: dict[str, Any]) -> None:
        """Take one piece of news from a host."""
        if "output" in event:
            self._feed_far(job, event["output"], event["data"])
        elif "pids" in event:
            self.outcome.pids[job.first : job.first + job.size] = event["pids"]
        elif "rank" in event:
            rank, status = event["rank"], event["status"]
            self.outcome.exits.append(Exit(rank, event["pid"], status, event["sent"]))
            how = f"ended with exit code {status}" if status >= 0 else f"was killed by {signal_name(-status)}"
            self._on_end(rank, f"rank {rank} (pid {event['pid']}) on host {job.host}", how)
            if status != 0 and self._dead_at is None and self._term_at is None:
                self._failed_at = time.monotonic()
                self._term_at = self._failed_at + FAILURE_GRACE_S
        elif "passed_on" in event:
            self._passed_on.append(event["passed_on"])
            if len(self._passed_on) >= len(self._running):
                if not any(self._passed_on):
                    self._say("SIGUSR1 was not passed on: no rank handles it before hvd.init(), or after its end")
                self._passed_on.clear()
        elif "error" in event:
            where = "" if len(self._jobs) == 1 else f" on {job.host}"
            self.outcome.error = f"the ranks could not all be started{where}: {event['error']}"
        elif "done" in event:
            self._leave(job)
        elif job.fileno() in self._running:
            if self._failed_at is not None and time.monotonic() - self._failed_at < _CONSEQUENCE_S:
                # Ranks notice the loss of a host before its agent, or the silence, tells us.
                own = range(job.first, job.first + job.size)
                self.outcome.excused.update(e.rank for e in self.outcome.exits if e.status > 0 and e.rank not in own)
            self._abandon(job, event["lost"])

    def _feed_far(self, job: Job, key: tuple[int, str], data: bytes) -> None:
        stream = self._far[key]
        if data:
            stream.feed(data)
            if not stream.wanted:
                job.refuse(*key)  # so that the rank gets a broken pipe, as if it wrote there itself

    def _leave(self, job: Job) -> None:
        fd = job.fileno()
        if self._running.pop(fd, None) is not None:
            self._poll.unregister(fd)
        self._over = not self._running

    def _say(self, line: str) -> None:
        sink = self._console[1]
        sink.end_line()
        sink.put(f"{self._plan.display.launcher}: {line}\n".encode())

    def _abandon(self, job: Job, reason: str) -> None:
        """Nothing more is to be had from a host: what may still run there is killed, and the others end."""
        job.kill()
        if len(self._jobs) > 1:
            ended = {e.rank for e in self.outcome.exits}
            ranks = [rank for rank in range(job.first, job.first + job.size) if rank not in ended]
            self.outcome.lost.update(dict.fromkeys(ranks, job.host))
            for rank in ranks:
                self._on_end(rank, f"rank {rank}", f"was lost with host {job.host} ({reason})")
            what = f"with {list_ranks(ranks)}" if ranks else "after its ranks had ended"
            reason = f"host {job.host} was lost {what}: {reason}"
        if self.outcome.first_failure is None:
            self.outcome.error = self.outcome.error or reason
        self._leave(job)
        if self._running and not self.outcome.interrupted:
            # Less patience than after a rank's failure: silence has taken its time already.
            self._end(b"T")
            self._kill_at = self._kill_at or time.monotonic() + LOST_GRACE_S

    def close(self) -> None:
        """Give everything back; if ranks still run, this kills them."""
        for job in self._jobs:
            job.hang_up()
        for job in self._jobs:
            job.close()
        for fd in list(self._streams):
            self._drop(fd)
        os.close(self._wake)
        os.close(self._wake_end)
