"""How requests reach the coordinator and the log reaches the ranks.

The coordinator runs on rank 0. ``Channel`` is what an engine needs of the path between; on one host it is a
request ring per rank and a log ring in the control page, and one rank alone needs no path at all.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Protocol

import msgspec

from horovod.core.coordinator import Coordinator, Declared, Run
from horovod.core.requests import NO_TOKEN, Request, Response
from horovod.transports.shm.control import Control, State
from horovod.transports.shm.rings import RecordReader, RecordWriter, bytes_of

__all__ = ["Channel", "CoordinatorChannel", "WorkerChannel"]

_DECLARE, _SUBMIT, _LEAVE = 1, 2, 3
_COORDINATOR = (0,)
_DECLARED, _RUN, _RUN_FUSED = 1, 2, 3

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_response = msgspec.msgpack.Decoder(Response).decode

LogEntry = Declared | Run


class Channel(Protocol):
    """One rank's path to the coordinator and the log.

    Attributes:
        patient: whether who makes progress now is waiting itself; see ``Control.nudge``.
    """

    patient: bool

    def declare(self, signature: int, request: Request) -> None:
        """Let a number stand for a request."""

    def submit(self, signature: int, token: int, patient: bool) -> None:
        """Submit a declared request; ``patient`` when the caller is about to wait for it."""

    def leave(self, reason: str) -> None:
        """Take part no more."""

    def has_news(self) -> bool:
        """Whether ``next`` has something, or the coordinator has work."""

    def next(self) -> LogEntry | None:
        """Return the next log entry, or None."""

    def is_behind(self) -> bool:
        """Whether records wait for a slow reader; then sleep only briefly."""


class WorkerChannel:
    """The path of a rank other than 0, through the control page."""

    patient = False

    def __init__(self, control: Control) -> None:
        rank, words64 = control.rank, control.words64
        self._control = control
        self._writer = RecordWriter(
            control.request_rings[rank], words64, control.request_head[rank], [control.request_tail[rank]]
        )
        # Who makes progress flushes what another thread submits.
        self._lock = threading.Lock()
        self._reader = RecordReader(control.log_ring, words64, control.log_head, control.log_tail[rank])
        self.has_news = self._reader.has_more

    def declare(self, signature: int, request: Request) -> None:
        with self._lock:
            self._writer.put_bytes(_DECLARE, (signature,), _encode(request))

    def submit(self, signature: int, token: int, patient: bool) -> None:
        with self._lock:
            self._writer.put(_SUBMIT, (signature, token))
        if patient:
            self._control.nudge(_COORDINATOR)
        else:
            self._control.ring(0)

    def leave(self, reason: str) -> None:
        with self._lock:
            self._writer.put_bytes(_LEAVE, (), reason.encode())
            self._writer.flush()
        self._control.ring(0)

    def is_behind(self) -> bool:
        return bool(self._writer.backlog) and not self._flush()

    def next(self) -> LogEntry | None:
        record = self._reader.get()
        if record is None:
            return None
        kind, words = record
        if kind == _RUN:
            return Run((words[0],), tuple(words[1:]))
        if kind == _RUN_FUSED:
            return Run(tuple(words), ())
        return Declared(words[0], _decode_response(bytes_of(words, 1)))

    def _flush(self) -> bool:
        with self._lock:
            done = self._writer.flush()
        self._control.ring(0)
        return done


class CoordinatorChannel:
    """The path of rank 0, which also serves all the others; without a control page, of one rank alone."""

    patient = False

    def __init__(self, coordinator: Coordinator, control: Control | None) -> None:
        self.coordinator = coordinator
        self._control = control
        self._inbox: collections.deque[tuple[int, int, Request | None]] = collections.deque()
        self._log: collections.deque[LogEntry] = collections.deque()
        self._readers: list[tuple[int, RecordReader]] = []
        self._writer: RecordWriter | None = None
        self._departed: set[int] = set()
        self._log_tail: list[int] = []
        self._others = range(0)
        if control is not None:
            words64 = control.words64
            self._others = others = range(1, control.size)
            self._readers = [
                (r, RecordReader(control.request_rings[r], words64, control.request_head[r], control.request_tail[r]))
                for r in others
            ]
            self._log_tail = control.log_tail
            self._writer = RecordWriter(
                control.log_ring, words64, control.log_head, [control.log_tail[r] for r in others]
            )

    def declare(self, signature: int, request: Request) -> None:
        self._inbox.append((signature, NO_TOKEN, request))

    def submit(self, signature: int, token: int, patient: bool) -> None:
        self._inbox.append((signature, token, None))

    def leave(self, reason: str) -> None:
        """Answer who waits for rank 0, through the log; its state in the control page tells the others."""
        self._serve()
        self.coordinator.leave(0, reason)
        self.publish()

    def is_behind(self) -> bool:
        return self._writer is not None and bool(self._writer.backlog)

    def has_news(self) -> bool:
        if self._inbox or self._log:
            return True
        for _, reader in self._readers:  # noqa: SIM110  spun on: a generator costs more than the look
            if reader.has_more():
                return True
        return False

    def next(self) -> LogEntry | None:
        log, writer = self._log, self._writer
        if not log or (writer is not None and writer.backlog):
            self._serve()
            if writer is not None and writer.backlog and not self._flush(writer):
                # An entry that the others cannot see yet must not be executed: it would wait for them.
                self._ring()
                return None
        return log.popleft() if log else None

    def _flush(self, writer: RecordWriter) -> bool:
        if writer.flush():
            return True
        # Who has left reads no more: the ring must not wait for it.
        for rank in self._departed:
            writer.forget(self._log_tail[rank])
        return writer.flush()

    def _serve(self) -> None:
        coordinator, inbox = self.coordinator, self._inbox
        came = False
        while inbox:
            came = True
            signature, token, request = inbox.popleft()
            if request is None:
                coordinator.submit(0, signature, token)
            else:
                coordinator.declare(0, signature, request)
        for rank, reader in self._readers:
            record = reader.get()
            while record is not None:
                came = True
                kind, words = record
                if kind == _SUBMIT:
                    coordinator.submit(rank, words[0], words[1])
                elif kind == _DECLARE:
                    coordinator.declare(rank, words[0], _decode_request(bytes_of(words, 1)))
                else:
                    self._departed.add(rank)
                    coordinator.leave(rank, bytes_of(words, 0).decode())
                record = reader.get()
        if came:
            self.publish()

    def notice_departures(self, fate: Callable[[int], str]) -> None:
        """Tell the coordinator of ranks that have left without a word: it may not have fitted into a full ring.

        Args:
            fate: says in words how a rank ended.
        """
        if self._control is None:
            return
        for rank, reader in self._readers:
            if rank not in self._departed and self._control.state_of(rank) is State.LEFT and not reader.has_more():
                self._departed.add(rank)
                self.coordinator.leave(rank, fate(rank))

    def publish(self) -> None:
        """Append what the coordinator decided to everybody's log."""
        log = self.coordinator.take()
        if not log:
            return
        self._log.extend(log)
        writer = self._writer
        if writer is None:
            return
        for entry in log:
            if isinstance(entry, Run):
                if len(entry.ids) == 1:
                    writer.put(_RUN, entry.ids + entry.tokens)
                else:
                    writer.put(_RUN_FUSED, entry.ids)
            else:
                writer.put_bytes(_DECLARED, (entry.id,), _encode(entry.response))
        self._ring()

    def _ring(self) -> None:
        if self._control is None:
            return
        if self.patient:
            self._control.nudge(self._others)
        else:
            self._control.ring_all(self._others)
