"""Turns the output of ranks into whole, labelled lines on the launcher's own output.

An ``OutputSink`` is one destination; it never blocks the launcher. A ``RankStream`` is one stream of one rank; it
passes on whole lines only, so that lines of different ranks never mix. A carriage return ends a line too, so that
progress bars move in place.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import itertools
import os
import re
import select
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TextIO

from horovod.launch.rotation import OutputFile
from horovod.phrases import list_ranks

__all__ = ["FileSink", "NullSink", "OutputSink", "RankStream", "TextSink", "Tracebacks"]

_LONGEST_LINE = 16 << 20
_FULL = 1 << 20
_TAIL_BYTES = 1 << 16
#: Beginning of a line after which a stream may end.
_BEGIN = b"Traceback (most recent call last):"
#: Time for which a traceback is held, in case the stream ends with it; PyTorch needs a second to end.
_HOLD_S = 3.0
#: A longer traceback is always shown.
_MOST_HELD = 256 << 10
#: Lines that TensorFlow prints in each process before it reads its log level.
_NOISE = re.compile(
    rb"^(WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    rb"|I0000 [0-9:. ]+\bport\.cc:\d+\] oneDNN custom operations are on\..*)\n",
    re.MULTILINE,
)


class OutputSink:
    """One destination of text; knows which stream has left its line unfinished at the cursor."""

    interactive = False

    def __init__(self) -> None:
        self.cursor_owner: object = None
        self.broken = False

    def show(self, owner: object, data: bytes) -> None:
        """Take text of one stream; a line that another stream left unfinished is ended first."""
        if self.broken or not data:
            return
        if self.cursor_owner not in (None, owner) and data != b"\n":
            data = b"\n" + data
        self.cursor_owner = None if data.endswith(b"\n") else owner
        self.put(data)

    def put(self, data: bytes) -> None:
        """Take text unchanged."""
        raise NotImplementedError

    @property
    def backlog(self) -> bool:
        """Whether text waits to be written."""
        return False

    @property
    def full(self) -> bool:
        """Whether so much text waits that the ranks should wait, too."""
        return False

    def fileno(self) -> int:
        """Descriptor to poll for writing; -1 when there is none."""
        return -1

    def flush(self) -> None:
        """Write what can be written without blocking."""

    def end_line(self) -> None:
        """Put the cursor at the beginning of a line."""
        self.show(None, b"" if self.cursor_owner is None else b"\n")


class FileSink(OutputSink):
    """A file descriptor: a terminal, a pipe or a file. It stays open."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._waiting: deque[memoryview] = deque()
        self._nbytes = 0
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self.interactive = os.isatty(fd)
        # A write of one page never blocks on a pipe that polls as writable; a disk is never waited for.
        self._step = 1 << 20 if stat.S_ISREG(os.fstat(fd).st_mode) else 512 if self.interactive else 4096

    def put(self, data: bytes) -> None:
        self._waiting.append(memoryview(data))
        self._nbytes += len(data)
        self.flush()

    @property
    def backlog(self) -> bool:
        return bool(self._waiting)

    @property
    def full(self) -> bool:
        return self._nbytes > _FULL

    def fileno(self) -> int:
        return self._fd

    def flush(self) -> None:
        while self._waiting and self._poll.poll(0):
            data = self._waiting.popleft()
            try:
                written = os.write(self._fd, data[: self._step])
            except BlockingIOError:
                written = 0
            except OSError as error:  # the reader is gone, or the disk is full
                if not self.broken and error.errno != errno.EPIPE:
                    self._complain(error)
                self.broken = True
                self._waiting.clear()
                self._nbytes = 0
                return
            self._nbytes -= written
            if written < len(data):
                self._waiting.appendleft(data[written:])
                if not written:
                    return

    def _complain(self, error: OSError) -> None:
        """Report why the output of the ranks is lost, if standard error still works."""
        with contextlib.suppress(OSError):
            os.write(2, f"horovodrun: the output of the ranks is lost: {error.strerror}\n".encode())


class TextSink(OutputSink):
    """A Python text stream, such as a notebook's ``sys.stdout``."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def put(self, data: bytes) -> None:
        try:
            self._stream.write(self._decoder.decode(data))
            self._stream.flush()
        except (OSError, ValueError):  # closed
            self.broken = True


class NullSink(OutputSink):
    """Discards output."""

    def put(self, data: bytes) -> None:
        pass


class RankStream:
    """Standard output or error of one rank.

    Args:
        sink: where whole lines go.
        label: prefix of each line; with an empty label, text passes through unchanged.
        file: gets all output unchanged, if given.
        stamp: returns the text before the label, if given.
        is_repeat: returns whether to hide a traceback that ends the stream, if given.
        is_quiet: whether to leave out the lines that TensorFlow prints before it reads its log level.
    """

    def __init__(
        self,
        sink: OutputSink,
        label: str = "",
        file: OutputFile | None = None,
        stamp: Callable[[], str] | None = None,
        is_repeat: Callable[[bytes], bool] | None = None,
        is_quiet: bool = False,
    ) -> None:
        self.sink = sink
        self.label = label.encode()
        self._file = file
        self._stamp = stamp
        self._partial = b""
        self._shown = False  # the terminal already shows the beginning of the line in _partial
        self._tail = b""
        self._is_repeat = is_repeat
        self._is_quiet = is_quiet
        self._held = b""
        #: Time until which a traceback is held back; None when there is none.
        self.hold_until: float | None = None

    @property
    def wanted(self) -> bool:
        """Whether a file or the sink still takes output."""
        return self._file is not None or not self.sink.broken

    @property
    def partial(self) -> bool:
        """Whether the beginning of a line waits for its end."""
        return bool(self._partial)

    def mute(self) -> None:
        """Show no more of the rank's output; a file still gets it."""
        self.sink, self._is_repeat, self._held = NullSink(), None, b""

    def feed(self, data: bytes) -> None:
        """Take output of the rank."""
        if self._file is not None:
            try:
                self._file.write(data)
            except OSError as error:
                told = f"horovodrun: {self._file.path} misses output from here on: {error.strerror}\n"
                self._close_file()
                self.sink.show(None, told.encode(errors="backslashreplace"))
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if not self.label:
            self.sink.put(data)
            return
        data = self._partial + data
        # \r at the very end may be the first half of \r\n.
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1
        if not end and len(data) > _LONGEST_LINE:
            end = len(data)
        self._partial = data[end:]
        if end:
            self._emit(data[:end])

    def _emit(self, text: bytes) -> None:
        text = text.replace(b"\r\n", b"\n")
        if self._is_quiet:
            text = _NOISE.sub(b"", text)
        if self._is_repeat is not None:
            text = self._hold(text)
        if text:
            self._show(text)

    def _hold(self, text: bytes) -> bytes:
        """Hold back text that begins with a traceback; return the text before it."""
        if self.hold_until is not None:
            self._held += text
            return b""
        start = 0 if text.startswith(_BEGIN) else text.find(b"\n" + _BEGIN) + 1
        if not start and not text.startswith(_BEGIN):
            return text
        self._held, self.hold_until = text[start:], time.monotonic() + _HOLD_S
        return text[:start]

    def let_go(self) -> None:
        """Show the text that was held back."""
        held, self._held, self.hold_until = self._held, b"", None
        if held:
            self._show(held)

    def _show(self, text: bytes) -> None:
        goes_on = self._shown and self.sink.cursor_owner is self
        lines = text.splitlines(keepends=True)
        first = lines.pop(0) if goes_on else b""
        # A progress bar that sends \r before it draws leaves an empty line before the \r: drop that line.
        label = self.label if self._stamp is None else self._stamp().encode() + self.label
        rest = [label + line for line in lines if line != b"\r"]
        self._shown = not text.endswith((b"\n", b"\r"))
        self.sink.show(self, first + b"".join(rest))

    def show_partial(self) -> None:
        """Show the beginning of a line now, such as a prompt on a terminal."""
        partial, self._partial = self._partial, b""
        self._emit(partial)

    def finish(self) -> None:
        """End the last line and the file: the rank has closed the stream."""
        rest, self._partial = self._partial.rstrip(b"\r"), b""
        if rest:
            self._emit(rest + b"\n")
        if self._is_repeat is not None and self._held and self._is_repeat(self._held):
            self._held = b""
        self.let_go()
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError:
                pass

    def last_lines(self, count: int) -> list[str]:
        """Return the last lines, without escape sequences; of a progress bar only its last state."""
        tail = _NOISE.sub(b"", self._tail) if self._is_quiet else self._tail
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", tail.decode(errors="replace"))
        lines = [line.rstrip().rpartition("\r")[2] for line in text.rstrip().split("\n")[-count:]]
        return lines if any(lines) else []


class Tracebacks:
    """The tracebacks that ended the streams of a job; one that several ranks raise is shown only once."""

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        self._same: dict[int, list[int]] = {}

    def is_repeat(self, rank: int, text: bytes) -> bool:
        """Record the end of a rank's stream, a traceback, and return whether another stream has ended with the same
        text, in which an error of ours may name the rank that raises it.
        """
        if len(text) > _MOST_HELD:
            return False
        text = text.replace(b"(rank %d, at " % rank, b"(at ").replace(b", while rank %d waited in " % rank, b", in ")
        first = self._first.setdefault(text, rank)
        if first != rank:
            self._same.setdefault(first, []).append(rank)
        return first != rank

    def only(self) -> set[int]:
        """Return the ranks of the only traceback of the job; none if it had several."""
        return {*self._first.values(), *itertools.chain(*self._same.values())} if len(self._first) == 1 else set()

    def summary(self, rank_of: Callable[[int], int | None] = int) -> list[str]:
        """Return a line for each traceback that was shown once instead of several times; ranks as users know them, and
        None for a process that has never had one.
        """
        return [
            f"{_named(map(rank_of, others))} ended with the same traceback as {_named([rank_of(first)])}"
            for first, others in sorted(self._same.items())
        ]


def _named(ranks: Iterable[int | None]) -> str:
    every = list(ranks)
    known, count = sorted(rank for rank in every if rank is not None), every.count(None)
    new = "a new process" if count == 1 else f"{count} new processes"
    return " and ".join([list_ranks(known)] * bool(known) + [new] * bool(count))
