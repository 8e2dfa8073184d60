"""The output of all ranks: reads it, passes it on in whole lines, and keeps the last lines of each rank."""

from __future__ import annotations

import functools
import os
import select
import time
from collections.abc import Sequence
from pathlib import Path

from horovod.launch.output import NullSink, OutputSink, RankStream, Tracebacks
from horovod.launch.plan import LaunchPlan
from horovod.launch.rotation import OutputFile

__all__ = ["RankStreams"]

TAIL_LINES = 20
_READ_BYTES = 1 << 16
_NAMES = ("stdout", "stderr")


class RankStreams:
    """Standard output and error of the ranks; ``poll`` gets each pipe that is opened here."""

    def __init__(self, sinks: tuple[OutputSink, OutputSink], poll: select.poll, plan: LaunchPlan) -> None:
        self._console, self._poll, self._plan = sinks, poll, plan
        self._is_quiet = plan.environ.get("TF_CPP_MIN_LOG_LEVEL") != "0"  # else ranks get 1
        self.sinks = list(dict.fromkeys(sinks))
        self.tracebacks = Tracebacks()
        self.pipes: dict[int, RankStream] = {}  # by our end of the pipe
        self._ranks: dict[int, tuple[RankStream, RankStream]] = {}
        self._hidden: set[int] = set()

    def open(self, rank: int, label: str, folder: str = "", pipes: bool = True) -> list[int]:
        """Open the output of a rank, and return the ends of the pipes that it gets; without ``pipes``, ``feed`` brings
        its output. The label, with ``{stream}`` to fill in, begins each line; with an empty one text passes unchanged.
        A copy goes to ``folder``, unless that is empty.

        Raises:
            OSError: a file or a pipe cannot be opened.
        """
        streams, theirs = [], []
        if rank in self._plan.display.hidden:
            self._hidden.add(rank)
        try:
            for name in _NAMES:
                stream = self._stream(rank, name, label, folder)
                streams.append(stream)
                if pipes:
                    end, their_end = os.pipe2(os.O_CLOEXEC)
                    os.set_blocking(end, False)
                    self.pipes[end] = stream
                    self._poll.register(end, select.POLLIN)
                    theirs.append(their_end)
        except OSError:
            for fd in theirs:
                os.close(fd)
            raise
        self._ranks[rank] = streams[0], streams[1]
        return theirs

    def _stream(self, rank: int, name: str, label: str, folder: str) -> RankStream:
        file = OutputFile(Path(folder, name), self._plan.rotation) if folder else None
        is_error = name == "stderr"
        merges = bool(label) and is_error and self._plan.display.merges_tracebacks
        return RankStream(
            NullSink() if rank in self._plan.display.hidden else self._console[is_error],
            label.format(stream=name), file, time.ctime if self._plan.timestamps else None,
            functools.partial(self.tracebacks.is_repeat, rank) if merges else None,
            is_error and self._is_quiet,
        )  # fmt: skip

    def relabel(self, rank: int, label: str) -> None:
        """Change the label of a rank's lines; ``label`` is as for ``open``."""
        for name, stream in zip(_NAMES, self._ranks[rank], strict=True):
            stream.label = label.format(stream=name).encode()

    def mute(self, rank: int) -> None:
        """Show no more of a rank's output."""
        for stream in self._ranks[rank]:
            stream.mute()

    def feed(self, source: tuple[int, str], data: bytes) -> bool:
        """Take output of a remote rank, given by rank and stream; return False when it has no reader any more."""
        stream = self._ranks[source[0]][_NAMES.index(source[1])]
        if data:
            stream.feed(data)
        return not data or stream.wanted

    def read(self, fd: int, is_last: bool = False) -> bool:
        """Pass on available output, and return whether there may be more. ``is_last``: expect none, even if some
        process still has the pipe open.
        """
        stream = self.pipes[fd]
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return not is_last
        if data:
            stream.feed(data)
        return bool(data) and stream.wanted  # else the rank gets a broken pipe, as if it wrote there itself

    def catch_up(self, rank: int) -> None:
        """Read the remaining output of a rank that has ended."""
        own = self._ranks[rank]
        for fd in [fd for fd, stream in self.pipes.items() if stream in own]:
            while self.read(fd, is_last=True):
                pass

    def drop(self, fd: int) -> None:
        """Stop reading a pipe."""
        self._poll.unregister(fd)
        self.pipes.pop(fd).finish()
        os.close(fd)

    @property
    def is_held_up(self) -> bool:
        """Whether the ranks must wait until a sink has caught up."""
        return any(sink.full for sink in self.sinks)

    def prompts(self) -> list[RankStream]:
        """Return the streams that may show the beginning of a line before its end has come."""
        return [
            stream for pair in self._ranks.values() for stream in pair if stream.partial and stream.sink.interactive
        ]

    def held_until(self) -> Sequence[float]:
        """Return the times at which held tracebacks will be shown."""
        return [error.hold_until for _, error in self._ranks.values() if error.hold_until is not None]

    def let_go(self, now: float) -> None:
        """Show the tracebacks that were held for long enough."""
        for _, error in self._ranks.values():
            if error.hold_until is not None and now >= error.hold_until:
                error.let_go()

    def finish(self) -> None:
        """Read the remaining output, and end all lines."""
        for fd in list(self.pipes):
            while self.read(fd, is_last=True):
                pass
            self.drop(fd)
        for pair in self._ranks.values():
            for stream in pair:
                stream.finish()
        for sink in self.sinks:
            sink.end_line()

    def tail(self, rank: int, count: int = TAIL_LINES) -> list[str]:
        """Return the last lines of a rank's standard error; without any, of its output if that was hidden."""
        out, error = self._ranks[rank]
        return error.last_lines(count) or (out.last_lines(count) if rank in self._hidden else [])

    def close(self) -> None:
        """Close all pipes."""
        for fd in list(self.pipes):
            self.drop(fd)
