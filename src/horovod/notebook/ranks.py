"""The ranks of a notebook's session in its kernel: a thread supervises them, and gathers their output."""

from __future__ import annotations

import codecs
import collections
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from horovod.launch.job import Job
from horovod.launch.output import OutputSink
from horovod.launch.plan import LaunchPlan
from horovod.launch.report import Exit, report
from horovod.launch.supervise import FixedJob
from horovod.notebook.messages import END_MARK
from horovod.phrases import list_ranks

__all__ = ["GatheredOutput", "SupervisedRanks"]

_FULL = 1 << 20


class GatheredOutput:
    """Passes output of the ranks from the reading thread to the thread that runs a cell."""

    def __init__(self) -> None:
        self.news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable when output has arrived
        self.sinks = _GatheringSink(self, 0), _GatheringSink(self, 1)
        self.ended: set[tuple[int, int, int]] = set()  # number, rank and stream of messages whose output has ended
        self._pieces: collections.deque[tuple[int, bytes]] = collections.deque()
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in self.sinks]
        self.nbytes = 0
        self.on_room: Callable[[], None] = lambda: None  # called when there is room for output of waiting ranks

    def put(self, stream: int, data: bytes) -> None:
        """Store output of stream 0 or 1; called by the reading thread."""
        self._pieces.append((stream, data))
        self.nbytes += len(data)
        self.ring()

    def ring(self) -> None:
        """Make ``news`` readable; safe in a signal handler."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self.news, 1)

    def show(self) -> bool:
        """Print the gathered output to this thread's standard streams; return whether there was any."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.news)
        was_full, last = self.nbytes > _FULL, None
        while self._pieces:
            stream, data = self._pieces.popleft()
            self.nbytes -= len(data)
            target = sys.stderr if stream else sys.stdout
            if last not in (None, target):
                last.flush()  # so that a notebook keeps the order of the streams
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed
                target.write(self._decoders[stream].decode(data))
            last = target
        if last is not None:
            last.flush()
        if was_full:
            self.on_room()
        return last is not None

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.news)


class _GatheringSink(OutputSink):
    def __init__(self, output: GatheredOutput, stream: int) -> None:
        super().__init__()
        self._output, self._stream = output, stream

    def show(self, owner: object, data: bytes) -> None:
        ended = [tuple(int(word) for word in found.groups()[1:]) for found in END_MARK.finditer(data)]
        data = END_MARK.sub(lambda found: b"" if found[1] else b"\n", data)
        if ended and not data and self.cursor_owner is owner:
            data = b"\n"  # after a progress bar; that of another rank goes on
        super().show(owner, data)
        self._output.ended.update((number, rank, stream) for number, rank, stream in ended)
        self._output.ring()

    def put(self, data: bytes) -> None:
        self._output.put(self._stream, data)

    @property
    def full(self) -> bool:
        return self._output.nbytes > _FULL


class SupervisedRanks(FixedJob):
    """Supervises ranks in a thread. Other threads may call only the methods below.

    Args:
        plan: the processes to start.
        output: receives the output of the ranks.
        jobs: the ranks of each host, in rank order.
        on_end: called when a rank has ended, with its number, its name and the cause.
    """

    def __init__(
        self, plan: LaunchPlan, output: GatheredOutput, jobs: Sequence[Job], on_end: Callable[[int, str, str], None]
    ) -> None:
        super().__init__(plan, output.sinks, jobs, on_end)
        self._output = output
        output.on_room = self.look
        self._wanted: collections.deque[bytes] = collections.deque()
        self._guard = threading.Lock()  # protects the descriptor that wakes the thread
        self._is_stopping = self._is_closed = False
        self._error = ""
        self.thread = threading.Thread(target=self._watch, name="horovod-notebook", daemon=True)

    def order(self, order: bytes) -> None:
        """Interrupt (``I``) or end (``T``, ``K``) all ranks; never blocks."""
        self._wanted.append(order)
        self.look()

    def look(self) -> None:
        """Wake the thread to check everything again; never blocks."""
        with self._guard:
            if not self._is_closed:
                self.wake()

    def stopping(self) -> None:
        """Record that the ranks are expected to end by themselves."""
        self._is_stopping = True

    @property
    def is_alive(self) -> bool:
        """Whether no rank is known to have ended."""
        outcome = self.outcome
        return self.thread.is_alive() and not (self._error or outcome.exits or outcome.lost or outcome.error)

    def why(self) -> str:
        """Return the reasons for the end of the ranks, in several lines; blocks until all have ended."""
        while self.thread.is_alive():
            self.thread.join(0.1)
            self._output.show()  # a rank that waits for a reader of its output would not end
        exits = self.outcome.exits
        lines = [self._error] if self._error else report(self.plan, self.outcome)
        well = [e.rank for e in exits if e.status == 0]
        ended = f"{list_ranks(well)} ended with exit code 0" if well else "a second interrupt, or close(), ended all"
        return "\n".join(lines or [ended])

    def run(self) -> None:
        super().run()
        self.outcome.tails.clear()  # a cell has already shown them

    def on_exit(self, ended: Exit) -> None:
        super().on_exit(ended)
        if not self._is_stopping:
            self.end_soon()
        self._output.ring()

    def on_poll(self) -> None:
        while self._wanted:
            order = self._wanted.popleft()
            if order == b"I":
                self._tell(order)
            else:
                self.end(order)

    def _watch(self) -> None:
        try:
            self.carry_out((), subprocess.DEVNULL)
        except Exception as error:  # no rank could be started
            self._error = f"{type(error).__name__}: {error}"
        self._output.ring()

    def close(self) -> None:
        with self._guard:
            self._is_closed = True
            super().close()
