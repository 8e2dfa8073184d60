"""Carry a recording of the timeline between hosts: its beginning and end, trace events, and times of arrival.

Between hosts all times are on the clock of rank 0's host; each leader converts them to its own clock and back. During
one recording it uses the offset that was known at its beginning: else an operation would move against the others when
the offset is known better.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Sequence

from horovod.engine.board import EVERY_SESSION, TimelineSession
from horovod.links.hosts.frames import Arrivals, Message, StartTrace, Told, Trace
from horovod.links.hosts.remote_ranks import RemoteRanks
from horovod.links.shm.board import ShmBoard

__all__ = ["Clock", "TraceRelay"]


#: Round trips after which the offset counts as known.
_ENOUGH = 8

#: A round trip up to this much slower than the best one still updates the estimate, to follow a drift.
_RENEWS = 1.1


class Clock:
    """The offset between the clocks of two hosts, from the quickest of several round trips."""

    def __init__(self) -> None:
        self.offset_ns = 0  # nanoseconds to add to this host's clock to get the other's
        self.is_known = threading.Event()  # set after some round trips
        self.samples = 0  # how many round trips there were
        self._best_ns = 0

    def note(self, sent_ns: int, there_ns: int, back_ns: int) -> None:
        """Take one round trip: when it began, on this host's clock, was answered, on the other's, and ended, on this
        one's.
        """
        took_ns = back_ns - sent_ns
        if took_ns < 0:
            return
        if not self.samples or took_ns <= self._best_ns * _RENEWS:
            self._best_ns = min(took_ns, self._best_ns or took_ns)
            self.offset_ns = there_ns - (sent_ns + back_ns) // 2
        self.samples += 1
        if self.samples >= _ENOUGH:
            self.is_known.set()


class TraceRelay:
    """See the module. ``remote`` knows the offset of the clocks. ``send`` sends messages towards the host of a rank,
    ``send_all`` to all other hosts with a direct connection, except one.
    """

    def __init__(
        self,
        board: ShmBoard,
        remote: RemoteRanks,
        ranks: Sequence[int],
        is_hub: bool,
        send: Callable[[int, Sequence[Message]], None],
        send_all: Callable[..., None],
    ) -> None:
        self._board, self._remote, self._is_hub = board, remote, is_hub
        self._send, self._send_all = send, send_all
        self._session: TimelineSession | None = None
        self._number = self._offset_ns = 0
        self._arrived = dict.fromkeys(ranks, 0)
        self._told = dict.fromkeys(ranks, 0)
        self._lock, self._spreading = threading.Lock(), threading.Lock()
        self._parked: dict[int, collections.deque[Trace | Told]] = collections.defaultdict(collections.deque)

    @property
    def is_busy(self) -> bool:
        """Whether a recording is under way, or events of some rank of this host are missing."""
        session = self._board.session
        if not session.number or self._is_hub:
            return bool(session.number) and not session.end
        return not session.end or min(self._told.values()) < session.number

    def look(self) -> None:
        """Pass on the new events on this host's board."""
        session = self._board.session
        if not session.number:
            return
        if self._is_hub:
            self._place()
            self.spread()
        self._tell_arrivals()
        if not self._is_hub:
            self._tell_traces()

    def spread(self) -> None:
        """Tell the other hosts that rank 0 has begun or ended a recording, before the operations that follow."""
        with self._spreading:
            session = self._board.session
            if self._is_hub and session.number and session != self._session:
                self._session = session
                self._send_all([StartTrace(session)])

    def owes(self, rank: int) -> bool:
        """Whether events of a rank of this host are missing in the present recording."""
        return not self._is_hub and self._told[rank] < self._board.session.number

    def end(self, ranks: Iterable[int]) -> None:
        """At the hub: expect no more events of ranks whose host is gone."""
        for rank in ranks:
            self._parked[rank].append(Told(rank, EVERY_SESSION))
        self._place()

    def take(self, host: int, message: StartTrace | Trace | Told | Arrivals) -> None:
        """Take a message of another host."""
        if isinstance(message, Arrivals):
            for key, at_ns in message.pairs:
                self._board.note_arrival(key, at_ns - self._offset_ns, message.rank)
            if self._is_hub:
                self._send_all([message], but=host)
        elif isinstance(message, StartTrace):
            if not self._is_hub:
                session = message.session
                if session.number != self._number:
                    self._number, self._offset_ns = session.number, self._remote.offset_ns
                self._board.set_session(session._replace(since_ns=max(1, session.since_ns - self._offset_ns)))
        elif self._is_hub:
            self._parked[message.rank].append(message)
            self._place()

    def _place(self) -> None:
        """Put events of other hosts' ranks where rank 0 reads them, as far as there is room."""
        with self._lock:
            for rank, parked in list(self._parked.items()):
                while parked:
                    first = parked[0]
                    if isinstance(first, Told):
                        self._board.finish_session(first.number, rank)
                    elif not self._board.put_trace(first.data, rank):
                        break
                    parked.popleft()

    def _tell_arrivals(self) -> None:
        news = []
        for rank, before in self._arrived.items():
            self._arrived[rank], keys = self._board.arrived(rank, before)
            pairs = [(key, at_ns + self._offset_ns) for key in keys if (at_ns := self._board.arrival(rank, key))]
            if pairs:
                news.append(Arrivals(rank, pairs))
        if news:
            self._send_all(news)

    def _tell_traces(self) -> None:
        news: list[Message] = []
        for rank, told in self._told.items():
            number = self._board.finished_session(rank)  # first: then the events before it are already in the ring
            if data := self._board.take_trace(rank):
                news.append(Trace(rank, data))
            if number > told:
                self._told[rank] = number
                news.append(Told(rank, number))
        if news:
            self._send_all(news)
