"""The timeline: every rank turns the records of its operations into trace events, and rank 0 writes them all.

During a recording, each rank has a thread that looks at the ring of records 25 times a second; so an operation itself
takes the same path with and without a recording. All ranks look at the same moments of their common clock: first each
notes the submission times of its ended operations, a little later it knows those of the others, and makes events. Rank
0 comes last, collects the events of the others from their rings on the board, and writes them all.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from horovod.engine.board import EVERY_SESSION, Query, TimelineSession
from horovod.engine.engine import Engine
from horovod.engine.times import now
from horovod.logs import logger
from horovod.observe.recording import Recording
from horovod.timeline.events import Events
from horovod.timeline.file import TraceFile

__all__ = ["Tracer"]

_PERIOD_NS = 40_000_000
#: Time of the second look in a period, if a rank has noted anything: rank 0 after the others.
_AGAIN_S, _LAST_AGAIN_S = 0.008, 0.015
_MOMENT_S = 0.001
#: Time for which ranks wait for each other at the end.
_END_S = 5.0
#: Separates blocks of events in the ring; JSON never contains it.
_SEPARATOR = b"\0"
#: The start time of a file.
_BEGUN = re.compile(rb'"start_time_since_epoch_in_micros":(\d+)')
_BATCH = 100
_MOST_UNSENT = 10_000


class _Keeper:
    """The thread of one recording. It looks again after ``again_s`` if the first look has noted anything. Each look
    calls ``turn`` with the events since the last one, which returns whether to continue; the end calls ``conclude``.
    """

    def __init__(
        self,
        recording: Recording,
        again_s: float,
        turn: Callable[[Recording, list[bytes]], bool],
        conclude: Callable[[Recording, list[bytes]], None],
    ) -> None:
        self.recording = recording
        self._again_s = again_s
        self._turn = turn
        self._conclude = conclude
        self._is_leaving = False
        # Use a bare lock: waiting for an Event runs Python code, at every look.
        self._bell = threading.Lock()
        self._bell.acquire()
        self._thread = threading.Thread(target=self._run, name="horovod-timeline", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Let the thread look now."""
        with contextlib.suppress(RuntimeError):  # it was woken already
            self._bell.release()

    def end(self) -> None:
        """Let the thread record the rest and end; wait for it."""
        self._is_leaving = True
        self.wake()
        self._thread.join(2 * _END_S)

    def _run(self) -> None:
        recording = self.recording
        again = False
        while True:
            pause_s = self._again_s if again else (_PERIOD_NS - now() % _PERIOD_NS) / 1e9
            self._bell.acquire(timeout=pause_s)
            if self._is_leaving or not self._turn(recording, recording.look()):
                break
            again = recording.is_hungry and not again
        self._conclude(recording, recording.last_look())


class Tracer:
    """Begins, continues and ends recordings."""

    # the present recording, or the one that this rank would make as rank 0: its file and whether cycles are marked;
    # None if none was begun, or its end was requested
    wanted: tuple[Path, bool] | None = None

    def __init__(self, subject: Engine, members: Callable[[int], tuple[int, ...]]) -> None:
        link = subject.link
        self._subject, self._members = subject, members
        self._rank, self._generation = link.rank, link.generation.number
        self._others = [other for other in range(link.generation.size) if other != link.rank]
        self._board, self._peers = link.board, link.peers
        self._lock = threading.Lock()
        self._keeper: _Keeper | None = None
        self._file: TraceFile | None = None
        self._number = 0
        self._unsent: list[bytes] = []
        self._ended_s = 0.0
        self._has_complained = False

    def start(self, path: Path, mark_cycles: bool) -> None:
        """Begin a recording, in place of a present one; writes nothing on a rank other than 0.

        Raises:
            OSError: the file cannot be written.
        """
        self.stop()
        self.wanted = (path, mark_cycles)
        if self._rank == 0:
            self._record(path, mark_cycles, goes_on=False)

    def go_on(self, before: tuple[Path, bool] | None) -> None:
        """Append to the recording of an earlier generation of the job, its ``wanted``, unless there is none.

        Raises:
            OSError: the file cannot be written.
        """
        self.wanted = before
        if before is not None and self._rank == 0:
            self._record(*before, goes_on=True)

    def _record(self, path: Path, mark_cycles: bool, goes_on: bool) -> None:
        since_ns, epoch_us = now(), time.time_ns() // 1000
        self._file = TraceFile(path, Events.first(epoch_us), goes_on)
        if goes_on:
            begun = _BEGUN.search(self._file.before)
            at_us = max(0, epoch_us - int(begun[1])) if begun is not None else 0
            since_ns -= at_us * 1000  # times count from the beginning of the file
            self._write([Events.reset(self._generation, 1 + len(self._others), at_us)])
        session = TimelineSession(self._number + 1, mark_cycles, since_ns, self._subject.position, 0)
        self._begin(session, self._write_all, lambda _, events: self._write(events))
        self._tell_others(session)

    def stop(self) -> None:
        """End the recording, if one is under way, and complete the file; does nothing on a rank other than 0.

        Blocks until the other ranks have sent their events, five seconds at most.
        """
        self.wanted = None
        if self._rank == 0:
            self._end()

    def _end(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        keeper.recording.session = keeper.recording.session._replace(end=self._subject.position + 1)
        self._tell_others(keeper.recording.session)
        keeper.end()
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline and not all(self._has_told(rank) for rank in self._others):
            self._collect()
            time.sleep(_MOMENT_S)
        self._collect()
        self._finish_file()

    def follow(self) -> None:
        """Begin or end a recording as rank 0 has done; called on the other ranks."""
        board = self._board
        if board is None or self._rank == 0:
            return
        with self._lock:
            session = board.session
            if session.number > self._number:
                self._ended_s = 0.0
                self._begin(session, self._send_all, self._conclude)
            elif self._keeper is not None:
                self._keeper.recording.session = session
                self._keeper.wake()

    def close(self) -> None:
        """Send the remaining events, as this rank leaves the job."""
        if self._rank == 0:
            self._end()
            return
        self.follow()
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.end()
        # Also without a known recording: one that has begun elsewhere meanwhile must not wait for this rank.
        self._number = EVERY_SESSION
        if self._board is not None:
            self._board.finish_session(EVERY_SESSION)

    def _begin(
        self,
        session: TimelineSession,
        turn: Callable[[Recording, list[bytes]], bool],
        conclude: Callable[[Recording, list[bytes]], None],
    ) -> None:
        self._number = session.number
        ring, board = self._subject.ring, self._board
        recording = Recording(self._rank, ring, session, self._members, board, self._generation)
        self._keeper = _Keeper(recording, _AGAIN_S if self._rank else _LAST_AGAIN_S, turn, conclude)

    # -- rank 0 --------------------------------------------------------------------------------------------------

    def _write_all(self, recording: Recording, events: list[bytes]) -> bool:
        self._write(events)
        self._collect()
        return True

    def _collect(self) -> None:
        for rank in self._others:
            data = self._board.take_trace(rank) if self._board is not None else b""
            if data:
                self._write(data.split(_SEPARATOR)[:-1])

    def _write(self, events: Sequence[bytes]) -> None:
        if self._file is None or not events:
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

    def _is_there(self, rank: int) -> bool:
        """Whether another rank's process lives."""
        return self._peers is not None and not self._peers.has_ended(rank)

    def _has_told(self, rank: int) -> bool:
        board = self._board
        return board is None or board.finished_session(rank) >= self._number or not self._is_there(rank)

    def _tell_others(self, session: TimelineSession) -> None:
        if self._board is not None:
            self._board.set_session(session)
            for rank in self._others:
                self._board.ask(rank, Query.TRACE)

    # -- the others ----------------------------------------------------------------------------------------------

    def _send_all(self, recording: Recording, events: list[bytes]) -> bool:
        self._unsent += events
        self._send()
        if not recording.session.end:
            return True
        clock = time.monotonic()
        self._ended_s = self._ended_s or clock
        return not recording.is_complete(self._subject.position) and clock < self._ended_s + _END_S / 2

    def _conclude(self, recording: Recording, events: list[bytes]) -> None:
        self._unsent += events
        self._send()
        deadline = time.monotonic() + _END_S
        while self._unsent and self._is_there(0) and time.monotonic() < deadline:
            time.sleep(_MOMENT_S)
            self._send()
        self._unsent = []
        if self._board is not None:
            self._board.finish_session(recording.session.number)

    def _send(self) -> None:
        """Put unsent events into the ring, as far as there is room."""
        board, unsent = self._board, self._unsent
        if board is None:
            return
        while unsent and board.put_trace(_SEPARATOR.join(unsent[:_BATCH]) + _SEPARATOR):
            del unsent[:_BATCH]
        if len(unsent) > _MOST_UNSENT:
            del unsent[: len(unsent) - _MOST_UNSENT // 2]
            self._complain("rank 0 does not take the events of the timeline; some are lost")

    def _complain(self, text: str) -> None:
        if not self._has_complained:
            logger.warning(text)
        self._has_complained = True
