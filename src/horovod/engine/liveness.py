"""Watches the other ranks, and raises an error when waiting for them is pointless."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from horovod import errors
from horovod.core.generation import Generation
from horovod.core.labels import waited_in_vain
from horovod.engine.board import Board
from horovod.engine.ports import Channel, Observer, Peers, Watch

__all__ = ["Liveness", "encode_reason"]

#: Seconds for which a leaving rank may go on with its current operation.
_LEAVE_S = 1.0
_STALLS = (errors.StallError, errors.DeadlockError)


class Log(Protocol):
    """The part of ``Execution`` that ``Liveness`` needs."""

    def advance(self) -> None:
        """Execute the new entries."""

    def has_news(self) -> bool:
        """Whether there are new entries, or submissions to take over."""

    def is_idle(self) -> bool:
        """Whether nothing is in flight."""

    def late(self) -> int:
        """Return a rank that has not done its part of an operation while this rank has; -1 if there is none."""

    def in_flight(self) -> Sequence[Any]:
        """Return every submission that is not done."""

    def describe(self, handle: Any) -> str:
        """Return a submission in words."""


class Liveness(Watch):
    """See the module; also a ``Watch`` for transports."""

    def __init__(self, rank: int, generation: Generation, peers: Peers, board: Board, observer: Observer) -> None:
        self._rank = rank
        self._generation = generation
        # the error with which every wait ends; None while waits may go on
        self.aborted: errors.HorovodInternalError | None = None
        # describes the operation that this rank executes; the engine sets it
        self.executing: Callable[[], str] = lambda: ""
        # The ranks that bring the log here: without them, waiting is pointless.
        self._sources = [other for other in (generation.neighbours(rank)[0], 0) if other != rank]
        self._has_lost = False
        self._peers = peers
        self._board = board
        self._observer = observer

    @property
    def is_alarmed(self) -> bool:
        return self._has_lost or self.aborted is not None or self._peers.is_alarmed()

    def check(self, rank: int, waited_s: float) -> None:
        if self.aborted is not None:
            raise self.aborted
        self._has_lost = False  # the caller may have dropped an earlier error, because the operation is over
        peers = self._peers
        lost = peers.gone()
        if lost is not None and peers.has_left(lost):
            # It has finished its operations, so only a rank that failed because of it will never come.
            lost = peers.culprit_of(rank) if peers.has_failed(rank) else None
        left = waited_s > _LEAVE_S and peers.has_left(rank)
        if lost is None and (left or peers.has_ended(rank)):
            lost = peers.culprit_of(rank)
        if lost is not None:
            raise self._lost(lost, self.executing())
        self._observer.in_execution(rank, waited_s)

    def abort(self, error: errors.HorovodInternalError) -> None:
        """End the waits of this rank, at its next check; called by any thread."""
        self.aborted = error

    def tick(self, log: Log, channel: Channel, waited_s: float) -> None:
        """Raise when waiting for the log is pointless; at home also tell the coordinator which ranks have left."""
        if self.aborted is not None:
            raise self.aborted
        self._has_lost = False
        peers = self._peers
        lost = peers.gone()
        if lost is not None:
            # The lost rank's last operations are in the log by now, and may be all that this rank waits for.
            log.advance()
            raise self._lost(lost, self._waited_in(log))
        # A rank without operations in flight may go on alone.
        for source in self._sources:
            if peers.has_left(source) and not log.is_idle() and not log.has_news():
                raise self._lost(peers.culprit_of(source), self._waited_in(log))
        late = log.late()
        if late >= 0:
            self.check(late, waited_s)
        self._observer.tick()
        channel.tend(lambda rank: peers.fate(rank, self._reason_of(rank)[1]))

    def _waited_in(self, log: Log) -> str:
        waiting = log.in_flight()
        if not waiting:
            return ""
        return log.describe(waiting[0])

    def _lost(self, rank: int, waited_in: str) -> errors.HorovodInternalError:
        """Return the error to raise because ``rank`` is gone; after a stall, the same error as on that rank."""
        self._has_lost = True
        stall, why = self._reason_of(rank)
        if stall is not None:
            return stall(why)
        pid = self._generation.members[rank].pid
        fate = self._peers.fate(rank, why)
        return errors.PeerLostError(waited_in_vain(fate, self._rank, waited_in), rank=rank, pid=pid)

    def _reason_of(self, rank: int) -> tuple[type[errors.StallError] | None, str]:
        """Return the type of the stall error of ``rank``, or None, and its reason, empty if it gave none."""
        text = self._board.reason(rank)
        if text is None:
            return None, ""
        kind, _, why = text.decode(errors="replace").partition("\n")
        return next((stall for stall in _STALLS if stall.__name__ == kind), None), why


def encode_reason(failure: errors.HorovodInternalError | None, why: str) -> bytes:
    """Return the message that a rank leaves on the board: how it fails, or without a failure why it leaves."""
    kind = type(failure).__name__ if failure is not None else ""
    return f"{kind}\n{why}".encode(errors="backslashreplace")
