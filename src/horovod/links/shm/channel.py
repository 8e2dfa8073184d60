"""Requests and log through the control page: a request ring per rank, and a log ring that all ranks of the host read.

The first rank of the host serves the others: its ``CoordinatorChannel`` hands requests to the coordinator, or to a
proxy if the coordinator is on another host.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

import msgspec

from horovod.core.coordinator import LogEntry
from horovod.core.requests import Request, Response
from horovod.engine.ports import Channel
from horovod.links.local import Decider, LocalChannel
from horovod.transports.shm.control import Control, Presence
from horovod.transports.shm.rings import RecordReader, RecordWriter, bytes_of

__all__ = ["CoordinatorChannel", "WorkerChannel"]

#: The rank of the host, in the control page's numbers, that serves the others.
_SERVER = 0

_DECLARE, _SUBMIT, _LEAVE = 1, 2, 3
_DECLARED, _RUN, _RUN_FUSED = 1, 2, 3

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_response = msgspec.msgpack.Decoder(Response).decode


class WorkerChannel(Channel):
    """The path of a rank that another one of its host serves; see ``Channel``."""

    patient = False
    has_news: Callable[[], bool]

    def __init__(self, control: Control) -> None:
        rank, words64 = control.rank, control.words64
        self._control = control
        self._writer = RecordWriter(
            control.request_rings[rank], words64, control.request_head[rank], [control.request_tail[rank]]
        )
        self._reader = RecordReader(control.log_ring, words64, control.log_head, control.log_tail[rank])
        self.has_news = self._reader.has_more

    def declare(self, signature: int, request: Request) -> None:
        self._writer.put_bytes(_DECLARE, (signature,), _encode(request))

    def submit(self, signature: int, note: int, patient: bool) -> None:
        self._writer.put(_SUBMIT, (signature, note))
        if patient:
            self._control.ring_later((_SERVER,))
        else:
            self._control.ring(_SERVER)

    def leave(self, reason: str) -> None:
        self._writer.put_bytes(_LEAVE, (), reason.encode(errors="backslashreplace"))
        self._writer.flush()
        self._control.ring(_SERVER)

    def is_behind(self) -> bool:
        return bool(self._writer.backlog) and not self._flush()

    def next(self) -> LogEntry | None:
        record = self._reader.get()
        if record is None:
            return None
        kind, words = record
        if kind == _RUN:
            return LogEntry(words[:1], words[1:])
        if kind == _RUN_FUSED:
            return LogEntry(words)
        return LogEntry(words[:1], response=_decode_response(bytes_of(words, 1)))

    def tend(self, fate: Callable[[int], str]) -> None:
        """Do nothing: the coordinator does not run here."""

    def _flush(self) -> bool:
        done = self._writer.flush()
        self._control.ring(_SERVER)
        return done


class CoordinatorChannel(LocalChannel):
    """The path of the rank that serves all others of its host; see ``Channel``. ``ranks`` are in the page's order."""

    def __init__(self, control: Control, coordinator: Decider, ranks: Sequence[int]) -> None:
        super().__init__(coordinator, ranks[control.rank])
        self._control = control
        words64 = control.words64
        self._others = others = [index for index in range(control.size) if index != control.rank]
        self._indices = {ranks[index]: index for index in others}
        self._readers = [
            (
                ranks[i],
                RecordReader(control.request_rings[i], words64, control.request_head[i], control.request_tail[i]),
            )
            for i in others
        ]
        self._departed: set[int] = set()
        self._has_served = False
        # Decisions that the others cannot read yet; executed now, they would wait for the others.
        self._hidden: collections.deque[LogEntry] = collections.deque()
        self._writer = RecordWriter(control.log_ring, words64, control.log_head, [control.log_tail[r] for r in others])

    def leave(self, reason: str) -> None:
        """Answer the ranks that wait for this one, through the log; this rank ignores later requests."""
        super().leave(reason)
        # Stop reading now: a peer that leaves after our answer must not be blamed for our failures.
        self._has_served = True

    def is_behind(self) -> bool:
        return bool(self._hidden)

    def has_news(self) -> bool:
        if self._has_come or self._log or self._hidden:
            return True
        for _, reader in self._readers:  # noqa: SIM110  spun on: a generator costs more than the look
            if reader.has_more():
                return True
        return False

    def next(self) -> LogEntry | None:
        log = self._log
        if log:
            return log.popleft()
        if self._has_served:
            # Later requests wait for the next round: another look costs as much as a small operation.
            self._has_served = False
            return None
        self._serve()
        if not log:
            return None
        self._has_served = True
        return log.popleft()

    def tend(self, fate: Callable[[int], str]) -> None:
        """Tell the coordinator which ranks left with a ring too full for a message; publish its decisions."""
        for rank, reader in self._readers:
            if rank not in self._departed and self._has_left(rank) and not reader.has_more():
                self._departed.add(rank)
                self._coordinator.leave(rank, fate(rank))
        self._publish()

    def _has_left(self, rank: int) -> bool:
        return self._control.state_of(self._indices[rank]) is Presence.LEFT

    def _flush(self) -> bool:
        writer = self._writer
        if writer.flush():
            return True
        # A rank that has left reads no more: the ring must not wait for it.
        for rank in self._departed:
            writer.forget(self._control.log_tail[self._indices[rank]])
        return writer.flush()

    def _serve(self) -> None:
        coordinator = self._coordinator
        for rank, reader in self._readers:
            record = reader.get()
            while record is not None:
                self._has_come = True
                kind, words = record
                if kind == _SUBMIT:
                    coordinator.submit(rank, words[0], words[1])
                elif kind == _DECLARE:
                    coordinator.declare(rank, words[0], _decode_request(bytes_of(words, 1)))
                else:
                    self._departed.add(rank)
                    coordinator.leave(rank, bytes_of(words, 0).decode())
                record = reader.get()
        if self._has_come or self._hidden:
            self._publish()

    def _publish(self) -> None:
        self._has_come = False
        hidden, writer = self._hidden, self._writer
        is_written = bool(hidden)  # the first one, so far as there was room
        hidden += self._coordinator.take()
        if not hidden:
            return
        while hidden:
            if not is_written:
                self._write(hidden[0])
            if writer.backlog and not self._flush():
                break
            self._log.append(hidden.popleft())
            is_written = False
        if self.patient and not hidden:
            self._control.ring_later(self._others)
        else:
            self._control.ring_all(self._others)

    def _write(self, entry: LogEntry) -> None:
        if entry.response is not None:
            self._writer.put_bytes(_DECLARED, entry.ids, _encode(entry.response))
        elif len(entry.ids) == 1:
            self._writer.put(_RUN, entry.ids + entry.notes)
        else:
            self._writer.put(_RUN_FUSED, entry.ids)
