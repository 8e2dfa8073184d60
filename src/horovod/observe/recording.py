"""One recording on one rank: selects its operations from the ring of records, and makes trace events of them."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Callable, Iterator

from horovod.core.requests import Request
from horovod.engine.board import Board, TimelineSession
from horovod.engine.times import CAPACITY, ENDED, REQUEST, SEQUENCE, STARTED, SUBMITTED, Ring, Times
from horovod.timeline.events import Events, Span

__all__ = ["Recording"]

#: Number of looks after which the other ranks are not waited for any more.
_LOOKS = 4


class Recording:
    """See the module. An ended operation is kept until the next look: by then the others have sent their arrival times.

    The session may be replaced by the same session with an end. One rank alone has no board, where ranks publish
    the times of their submissions.
    """

    def __init__(
        self,
        rank: int,
        ring: Ring,
        session: TimelineSession,
        members: Callable[[int], tuple[int, ...]],
        board: Board | None,
        generation: int = 1,
    ) -> None:
        self._rank = rank
        self._ring = ring
        self.session = session
        self._members = members
        self._board = board
        title = f"rank {rank} (pid {os.getpid()} on {os.uname().nodename})"
        title += f", generation {generation}" if generation > 1 else ""
        self._events = Events(rank, title, session.since_ns, self._marks, generation)
        self._last: Times | None = None
        self._open: list[Times] = []
        self._noted: list[tuple[Times, int, int]] = []

    @property
    def is_hungry(self) -> bool:
        """Whether operations have ended that have no events yet."""
        return bool(self._noted)

    def is_complete(self, position: int) -> bool:
        """Whether all operations of the recording have ended here; ``position`` is this rank's position in the log."""
        end = self.session.end
        return position >= end - 1 and not any(0 < record[SEQUENCE] < end for record in self._open)

    def look(self) -> list[bytes]:
        """Return the events of operations that have ended, and whose times on other ranks are known."""
        if not (self._noted or self._open or (self._ring and self._ring[-1] is not self._last)):
            return []
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
        """Return the events of all operations that have ended."""
        events = self.look()
        for record, key, _ in self._noted:
            self._events.add(Span._make([*record, *self._readiness(record, key)]))
        self._noted = []
        return [*events, *self._events.take()]

    def _marks(self, process_set: int) -> bool:
        """Whether this rank marks executions: one of the executing ranks does; none if the process set is gone."""
        return self.session.mark_cycles and self._members(process_set)[:1] == (self._rank,)

    def _is_within(self, record: Times) -> bool:
        session, sequence = self.session, record[SEQUENCE]
        if not sequence:
            return bool(record[ENDED] >= session.since_ns)
        return bool(sequence > session.begin and not 0 < session.end <= sequence)

    def _fresh(self) -> list[Times]:
        """Return the operations that were submitted since the last look."""
        ring, last = self._ring, self._last
        if not ring or ring[-1] is last:
            return []
        # Most looks find a few records; a copy of the ring would fetch thousands into the cache of a computing thread.
        try:
            fresh = _after(last, reversed(ring))
        except RuntimeError:  # another thread submits at this moment
            fresh = _after(last, reversed(list(ring)))
        self._last = fresh[-1]
        if len(fresh) == CAPACITY and fresh[0][SUBMITTED] > self.session.since_ns:
            self._events.lost(fresh[0][SUBMITTED])
        return fresh

    def _readiness(self, record: Times, key: int) -> tuple[int, int]:
        """Return when the last rank submitted it, and which rank that was."""
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


def _after(last: Times | None, records: Iterator[Times]) -> list[Times]:
    """Return the records after ``last``, of which the latest one comes first; all, if it is not there."""
    return [*itertools.takewhile(lambda record: record is not last, records)][::-1]


def _key(record: Times) -> int:
    request: Request = record[REQUEST]
    return int(record[SEQUENCE]) << 32 | zlib.crc32(request.name.encode())
