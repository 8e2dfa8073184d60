"""The timeline: every rank turns the records of its operations into trace events, and rank 0 writes them all.

While a recording is under way each rank has a thread that looks at the ring of records fifty times a second. It tells
the others when this rank had submitted what is done, and turns it into events at a later look, when the others have
told theirs. So an operation itself takes the same way with and without a recording. Rank 0 collects the events of all
ranks from their rings on the board.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

from horovod.core.requests import Request
from horovod.engine.board import Board, Wish
from horovod.engine.logs import logger
from horovod.engine.records import ENDED, REQUEST, SEQUENCE, STARTED, SUBMITTED, Record, Ring, now
from horovod.timeline.events import Events, Span
from horovod.timeline.file import TraceFile

__all__ = ["Tracer"]

_LOOK_S = 0.02
_LOOK_AGAIN_S = 0.01
#: Looks after which the other ranks are not waited for.
_LOOKS = 4
#: How long rank 0 waits at the end for what the others have to tell.
_END_S = 2.0
_UNSENT = 100_000


class _Recording:
    """One recording, on one rank.

    Args:
        rank: this rank.
        ring: its records.
        since_ns: when the recording began.
        mark_cycles: whether to mark executions.
        members: returns the ranks of a process set.
        board: None for one rank alone.
    """

    def __init__(
        self,
        rank: int,
        ring: Ring,
        since_ns: int,
        mark_cycles: bool,
        members: Callable[[int], tuple[int, ...]],
        board: Board | None,
    ) -> None:
        self._rank = rank
        self._ring = ring
        self._since_ns = since_ns
        self._members = members
        self._board = board
        title = f"rank {rank} (pid {os.getpid()} on {os.uname().nodename})"
        self._events = Events(rank, title, since_ns, mark_cycles)
        self._last: Record | None = None
        self._open: list[Record] = []
        self._noted: list[tuple[Record, int]] = []

    @property
    def is_hungry(self) -> bool:
        """Whether operations are done that are no events yet."""
        return bool(self._noted)

    def look(self, at_once: bool = False) -> list[bytes]:
        """Return the events of what is done, and known of all its ranks; ``at_once`` of everything that is done."""
        noted, self._noted = self._noted, []
        for record, looks in noted:
            latest, last = self._readiness(record)
            if latest or at_once or looks >= _LOOKS:
                self._events.add(Span._make([*record, latest, last]))
            else:
                self._noted.append((record, looks + 1))
        still_open = []
        for record in [*self._open, *self._fresh()]:
            if not record[ENDED]:
                still_open.append(record)
            elif record[ENDED] >= self._since_ns:
                self._note(record)
                self._noted.append((record, 0))
        self._open = still_open
        return self._events.take() if not at_once else [*self._events.take(), *self._rest()]

    def _rest(self) -> list[bytes]:
        for record, _ in self._noted:
            self._events.add(Span._make([*record, *self._readiness(record)]))
        self._noted = []
        return self._events.take()

    def _fresh(self) -> list[Record]:
        records = list(self._ring)
        if not records:
            return records
        last, self._last = self._last, records[-1]
        for index in range(len(records) - 1, -1, -1):
            if records[index] is last:
                return records[index + 1 :]
        if last is not None:
            self._events.lost(records[0][SUBMITTED])
        return records

    def _note(self, record: Record) -> None:
        if self._board is not None and record[STARTED]:
            self._board.note_arrival(_key(record), record[SUBMITTED])

    def _readiness(self, record: Record) -> tuple[int, int]:
        """When the last rank submitted it, and which rank that was."""
        board = self._board
        if board is None or not record[STARTED]:
            return record[SUBMITTED], self._rank
        key = _key(record)
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
    return record[SEQUENCE] << 32 | zlib.crc32(request.name.encode())  # type: ignore[no-any-return]


class Tracer:
    """Begins, keeps up and ends recordings.

    Args:
        rank: this rank.
        size: number of ranks.
        ring: the records of this rank.
        members: returns the ranks of a process set.
        board: None for one rank alone.
        is_there: whether another rank's process lives.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        ring: Ring,
        members: Callable[[int], tuple[int, ...]],
        board: Board | None,
        is_there: Callable[[int], bool],
    ) -> None:
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._ring = ring
        self._members = members
        self._board = board
        self._is_there = is_there
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._recording: _Recording | None = None
        self._file: TraceFile | None = None
        self._number = 0
        self._mark_cycles = False
        self._unsent: list[bytes] = []
        self._dropped = 0

    def start(self, path: Path, mark_cycles: bool) -> None:
        """Begin a recording, in the place of one that is under way; does nothing on a rank other than 0.

        Raises:
            OSError: the file cannot be written.
        """
        if self._rank != 0:
            return
        self.stop()
        with self._lock:
            since_ns, epoch_ns = now(), time.time_ns()
            self._file = TraceFile(path, Events.first(epoch_ns // 1000))
            self._mark_cycles = mark_cycles
            self._begin(self._number + 1, since_ns, mark_cycles)
        if self._board is not None:
            self._board.set_session(self._number, True, mark_cycles, since_ns)
            self._tell_others()

    def stop(self) -> None:
        """End the recording, if one is under way, and complete the file; does nothing on a rank other than 0.

        Blocks until the other ranks have told what they did, two seconds at most.
        """
        if self._rank != 0 or self._recording is None:
            return
        board = self._board
        if board is not None:
            board.set_session(self._number, False, self._mark_cycles, board.session[3])
            self._tell_others()
        self._end_thread()
        with self._lock:
            self._look(at_once=True)
            deadline = time.monotonic() + _END_S
            while board is not None and time.monotonic() < deadline:
                if all(board.has_finished(r, self._number) or not self._is_there(r) for r in self._others):
                    break
                self._collect()
                time.sleep(0.001)
            self._collect()
            self._recording = None
            self._finish_file()

    def follow(self) -> None:
        """Begin or end what rank 0 has begun or ended; called on the other ranks."""
        board = self._board
        if board is None or self._rank == 0:
            return
        number, is_on, mark_cycles, since_ns = board.session
        if self._recording is not None and (not is_on or number != self._number):
            self._conclude()
        if is_on and number > self._number:
            with self._lock:
                self._begin(number, since_ns, mark_cycles)
        elif number > self._number:
            # It was over before this rank heard of it.
            self._number = number
            board.finish_session(number)

    def close(self) -> None:
        """Tell what is left to tell: this rank leaves the job."""
        if self._rank == 0:
            self.stop()
        elif self._recording is not None:
            self._conclude()

    def _begin(self, number: int, since_ns: int, mark_cycles: bool) -> None:
        self._number = number
        self._recording = _Recording(self._rank, self._ring, since_ns, mark_cycles, self._members, self._board)
        self._wake.clear()
        self._thread = threading.Thread(target=self._keep_looking, name="horovod-timeline", daemon=True)
        self._thread.start()

    def _conclude(self) -> None:
        """On a rank other than 0: tell what is left, and that this was all."""
        self._end_thread()
        with self._lock:
            self._look(at_once=True)
            self._recording = None
            self._unsent = []
            if self._board is not None:
                self._board.finish_session(self._number)

    def _end_thread(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._wake.set()
            thread.join(_END_S)

    def _keep_looking(self) -> None:
        pause_s = _LOOK_S
        while not self._wake.wait(pause_s):
            with self._lock:
                self._look()
                if self._rank == 0:
                    self._collect()
                pause_s = _LOOK_AGAIN_S if self._recording is not None and self._recording.is_hungry else _LOOK_S

    def _look(self, at_once: bool = False) -> None:
        if self._recording is None:
            return
        events = self._recording.look(at_once)
        if self._rank == 0:
            self._write(events)
            return
        self._unsent += events
        self._send()

    def _send(self) -> None:
        """Put what was not sent yet into the ring, as far as there is room."""
        board, unsent = self._board, self._unsent
        if board is None or not unsent:
            return
        size = 1000
        while unsent and board.put_trace(b"\n".join(unsent[:size]) + b"\n"):
            del unsent[:size]
        if len(unsent) > _UNSENT:
            del unsent[: len(unsent) - _UNSENT // 2]
            self._complain("rank 0 does not take the events of the timeline; some are lost")

    def _collect(self) -> None:
        for rank in self._others:
            data = self._board.take_trace(rank) if self._board is not None else b""
            if data:
                self._write(data.split(b"\n")[:-1])

    def _write(self, events: Iterable[bytes]) -> None:
        if self._file is None:
            return
        try:
            self._file.append(events)
        except OSError as error:
            self._complain(f"the timeline {self._file.path} ends here: {error}")
            self._finish_file()

    def _finish_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.finish()
            except OSError as error:
                self._complain(f"the timeline {file.path} could not be completed: {error}")

    def _complain(self, text: str) -> None:
        if not self._dropped:
            logger.warning(text)
        self._dropped += 1

    def _tell_others(self) -> None:
        if self._board is not None:
            for rank in self._others:
                self._board.ask(rank, Wish.TRACE)
