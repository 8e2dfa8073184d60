"""One recording on one rank: picks what belongs to it from the ring of records, and makes trace events of it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable

from horovod.core.requests import Request
from horovod.engine.board import Board, Session
from horovod.engine.records import CAPACITY, ENDED, REQUEST, SEQUENCE, STARTED, SUBMITTED, Record, Ring
from horovod.timeline.events import Events, Span

__all__ = ["Recording"]

#: Looks after which the other ranks are not waited for.
_LOOKS = 4


class Recording:
    """See the module. An operation that is done is kept for the next look: by then the others have told when they came.

    Args:
        rank: this rank.
        ring: its records.
        session: what is to be recorded; may be replaced by the same one with an end.
        members: returns the ranks of a process set.
        board: where ranks tell each other when they submitted what; None for one rank alone.
    """

    def __init__(
        self,
        rank: int,
        ring: Ring,
        session: Session,
        members: Callable[[int], tuple[int, ...]],
        board: Board | None,
    ) -> None:
        self._rank = rank
        self._ring = ring
        self.session = session
        self._members = members
        self._board = board
        title = f"rank {rank} (pid {os.getpid()} on {os.uname().nodename})"
        self._events = Events(rank, title, session.since_ns, session.mark_cycles)
        self._last: Record | None = None
        self._open: list[Record] = []
        self._noted: list[tuple[Record, int, int]] = []

    @property
    def is_hungry(self) -> bool:
        """Whether operations are done that are no events yet."""
        return bool(self._noted)

    def is_complete(self, position: int) -> bool:
        """Whether all that belongs to the recording is done here; ``position`` is how far this rank is in the log."""
        end = self.session.end
        return position >= end - 1 and not any(0 < record[SEQUENCE] < end for record in self._open)

    def look(self) -> list[bytes]:
        """Return the events of what is done, and known of all its ranks."""
        noted, self._noted = self._noted, []
        for record, key, looks in noted:
            latest, last = self._readiness(record, key)
            if latest or looks >= _LOOKS:
                self._events.add(Span._make([*record, latest, last]))
            else:
                self._noted.append((record, key, looks + 1))
        still_open = []
        for record in [*self._open, *self._fresh()]:
            if not record[ENDED]:
                still_open.append(record)
            elif self._is_within(record):
                key = _key(record)
                if self._board is not None and record[STARTED]:
                    self._board.note_arrival(key, record[SUBMITTED])
                self._noted.append((record, key, 0))
        self._open = still_open
        return self._events.take()

    def last_look(self) -> list[bytes]:
        """Return the events of all that is done."""
        events = self.look()
        for record, key, _ in self._noted:
            self._events.add(Span._make([*record, *self._readiness(record, key)]))
        self._noted = []
        return [*events, *self._events.take()]

    def _is_within(self, record: Record) -> bool:
        session, sequence = self.session, record[SEQUENCE]
        if not sequence:
            return bool(record[ENDED] >= session.since_ns)
        return bool(sequence > session.begin and not 0 < session.end <= sequence)

    def _fresh(self) -> list[Record]:
        records = list(self._ring)
        if not records:
            return records
        last, self._last = self._last, records[-1]
        for index in range(len(records) - 1, -1, -1):
            if records[index] is last:
                return records[index + 1 :]
        if len(records) == CAPACITY and records[0][SUBMITTED] > self.session.since_ns:
            self._events.lost(records[0][SUBMITTED])
        return records

    def _readiness(self, record: Record, key: int) -> tuple[int, int]:
        """When the last rank submitted it, and which rank that was."""
        board = self._board
        if board is None or not record[STARTED]:
            return record[SUBMITTED], self._rank
        latest, last = 0, -1
        for member in self._members(record[REQUEST].process_set):
            at_ns = board.arrival(member, key)
            if not at_ns:
                return 0, -1
            if at_ns > latest:
                latest, last = at_ns, member
        return latest, last


def _key(record: Record) -> int:
    request: Request = record[REQUEST]
    return int(record[SEQUENCE]) << 32 | zlib.crc32(request.name.encode())
