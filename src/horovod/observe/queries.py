"""Ask another rank for its status, and answer when asked.

The thread of the rank that has the turn gives the answer, as a rule the background thread: the
rank's main thread need not do anything. A rank that lives but does not answer has an engine that cannot run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence

import msgspec

from horovod.core.requests import Request
from horovod.engine.board import Board, Query
from horovod.engine.engine import Engine
from horovod.engine.handles import Handle
from horovod.engine.times import now
from horovod.observe import stacks

__all__ = ["PATIENCE_S", "Blocked", "Queries", "RankStatus"]

#: Time to wait for an answer, in seconds.
PATIENCE_S = 2.0
_STACK_BYTES = 16 << 10
_MOST_OTHERS = 16


class Blocked(msgspec.Struct, array_like=True):
    """The operation that a thread of a rank waits for."""

    request: Request
    members: tuple[int, ...]  # the ranks of its process set
    waited_s: float  # seconds since its submission, at the time of the answer
    executing: bool  # whether all members have submitted it, and it is being executed
    times: int = 0  # how often this rank has submitted it, this time included


class RankStatus(msgspec.Struct, array_like=True):
    """The present activity of a rank."""

    stack: list[str]  # stack of its main thread, as Python prints it, outermost frame first
    blocked: Blocked | None = None  # the operation that its main thread waits for, or None
    failure: str = ""  # why it takes part no more, or empty
    others: list[Blocked] = []  # the operations that its other threads wait for
    free: str = ""  # a thread that may still submit operations; empty when every one that could waits for an operation
    in_flight: int = -1  # number of its operations that are not done; -1 if unknown
    operations: int = 0  # number of its submitted operations


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RankStatus).decode


class Queries:
    """Both sides of a query: asking and answering. ``fulfil`` is called with wishes beyond a status, and the asking
    rank.
    """

    def __init__(self, board: Board, describe: Callable[[], RankStatus], fulfil: Callable[[int, int], None]) -> None:
        self.board = board
        self._describe = describe
        self._fulfil = fulfil
        self._asked: dict[int, tuple[int, int]] = {}  # the number of the open question to a rank, and its time in ns
        self._lock = threading.Lock()

    def attend(self) -> None:
        """Answer a waiting question, if there is one; the engine's threads call it between their other work."""
        if not self._lock.acquire(False):
            return
        try:
            question = self.board.question()
            if question is None:
                return
            number, wanted, asker = question
            self.board.give_answer(number, _encode(self._describe()) if wanted & Query.STATUS else b"")
            if wanted & ~Query.STATUS:
                self._fulfil(wanted, asker)
        finally:
            self._lock.release()

    def ask(self, ranks: Iterable[int], wanted: int = Query.STATUS) -> None:
        """Ask other ranks."""
        for rank in ranks:
            if rank != self.board.rank:
                self._asked[rank] = self.board.ask(rank, wanted), now()

    def answers(self, ranks: Sequence[int]) -> dict[int, RankStatus]:
        """Return the answers of those of ``ranks`` that have answered."""
        found = {}
        for rank in ranks:
            if rank == self.board.rank:
                found[rank] = self._describe()
            elif rank in self._asked:
                text = self.board.answer(rank, self._asked[rank][0])
                if text is not None:
                    try:
                        found[rank] = _decode(text)
                    except msgspec.DecodeError:
                        found[rank] = RankStatus(["(its answer was too long)"])
        return found

    def waited_s(self, rank: int) -> float:
        """Return the seconds for which ``rank`` has owed an answer."""
        return (now() - self._asked[rank][1]) / 1e9 if rank in self._asked else 0.0


def current_status(subject: Engine, members_of: Callable[[int], tuple[int, ...]]) -> RankStatus:
    """Return the status of this process."""
    waits, count = subject.waits, subject.count
    ident = threading.main_thread().ident or 0
    frame, main = sys._current_frames().get(ident), waits().get(ident)
    stack = stacks.render(frame, waits=main is not None)
    while len(stack) > 1 and sum(len(line.encode(errors="backslashreplace")) for line in stack) > _STACK_BYTES:
        del stack[0]
    # Count before and after the look at waits: if a thread was woken in between, the later count lacks its operation.
    pending = _in_flight(subject)
    waiting, free = stacks.handles_waited_for(waits())
    still = _in_flight(subject)
    blocked = _blocked(main, members_of, count) if main is not None else None
    others = [_blocked(handle, members_of, count) for handle in waiting.values() if handle is not main]
    if len(others) > _MOST_OTHERS:
        others, free = [], free or "more threads than a report names"
    operations = count(main.cached.request)[1] if main is not None else 0
    number = len(still) if still is not None and still == pending else -1
    failure = str(subject.failure) if subject.failure is not None else ""
    return RankStatus(stack, blocked, failure, others, free, number, operations)


def _in_flight(subject: Engine) -> Sequence[Handle] | None:
    try:
        return subject.in_flight()
    except RuntimeError:  # another thread submits at this moment
        return None


def _blocked(
    handle: Handle, members_of: Callable[[int], tuple[int, ...]], count: Callable[[Request], tuple[int, int]]
) -> Blocked:
    _, submitted, _, _, started, *_ = handle.times
    request = handle.cached.request
    waited_s = (now() - submitted) / 1e9
    return Blocked(request, members_of(request.process_set), waited_s, started > 0, count(request)[0])
