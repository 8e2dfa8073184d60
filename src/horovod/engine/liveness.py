"""Looks after the other ranks, and says when there is no point in waiting for them any more."""

from __future__ import annotations

from horovod import errors
from horovod.core.departures import waited_in_vain
from horovod.core.generation import Generation
from horovod.engine.board import Board
from horovod.engine.ports import Channel, Observer, Peers, Progress

__all__ = ["Liveness", "encode_reason"]

#: How long a rank that leaves may go on with the operation that it is in.
_LEAVE_S = 1.0
_STALLS = (errors.StallError, errors.DeadlockError)


class Liveness:
    """See the module; a ``Monitor`` for the engine, and a ``Watch`` for transports.

    Args:
        rank: this rank.
        generation: who takes part.
        peers: the processes of the other ranks.
        board: where they say why they fail or leave.
        observer: knows of stalls.

    Attributes:
        aborted: with what every wait ends; None as long as it may go on.
    """

    def __init__(self, rank: int, generation: Generation, peers: Peers, board: Board, observer: Observer) -> None:
        self._rank = rank
        self._generation = generation
        self.aborted: errors.HorovodInternalError | None = None
        # The ranks that bring the log here: without them nothing can be waited for.
        self._sources = [other for other in (generation.neighbours(rank)[0], generation.home) if other != rank]
        self._has_lost = False
        self._peers = peers
        self._board = board
        self._observer = observer

    @property
    def is_alarmed(self) -> bool:
        """Whether a rank has ended, failed or left, or this one was aborted, since the last look."""
        return self._has_lost or self.aborted is not None or self._peers.is_alarmed()

    def check(self, rank: int, waited_s: float) -> None:
        """Raise when waiting for ``rank`` in the middle of an operation is pointless; see ``Watch``."""
        if self.aborted is not None:
            raise self.aborted
        peers = self._peers
        lost = peers.gone()
        left = waited_s > _LEAVE_S and peers.has_left(rank)
        if lost is None and (left or peers.has_ended(rank)):
            lost = peers.culprit_of(rank)
        if lost is not None:
            raise self._lost(lost, "the middle of a collective")
        self._observer.in_execution(rank, waited_s)

    def abort(self, error: errors.HorovodInternalError) -> None:
        """End what this rank waits for, at its next look; called by any thread."""
        self.aborted = error

    def tick(self, log: Progress, channel: Channel, waited_s: float) -> None:
        """Raise when waiting for the log is pointless; at home also tell the coordinator who has left.

        Args:
            log: what this rank waits for.
            channel: its path to the coordinator.
            waited_s: how long this rank has waited, in seconds.
        """
        if self.aborted is not None:
            raise self.aborted
        peers = self._peers
        lost = peers.gone()
        if lost is not None:
            # The lost rank's last operations are in the log by now, and may be all that this rank waits for.
            log.advance()
            raise self._lost(lost, self._waited_in(log))
        # A rank that waits for nothing may go on alone.
        for source in self._sources:
            if peers.has_left(source) and not log.is_idle() and not log.has_news():
                raise self._lost(peers.culprit_of(source), self._waited_in(log))
        late = log.late()
        if late >= 0:
            self.check(late, waited_s)
        self._observer.tick()
        channel.tend(lambda rank: peers.fate(rank, self._reason_of(rank)[1]))

    def _waited_in(self, log: Progress) -> str:
        waiting = log.in_flight()
        if not waiting:
            return ""
        return log.describe(waiting[0])

    def _lost(self, rank: int, waited_in: str) -> errors.HorovodInternalError:
        """Return what to raise because ``rank`` is gone: if a stall made it fail, then the same as there."""
        self._has_lost = True
        stall, why = self._reason_of(rank)
        if stall is not None:
            return stall(why)
        pid = self._generation.members[rank].pid
        fate = self._peers.fate(rank, why)
        return errors.PeerLostError(waited_in_vain(fate, self._rank, waited_in), rank=rank, pid=pid)

    def _reason_of(self, rank: int) -> tuple[type[errors.StallError] | None, str]:
        """Return the kind of stall that made ``rank`` fail, if one did, and why it failed or left, if it said so."""
        text = self._board.reason(rank)
        if text is None:
            return None, ""
        kind, _, why = text.decode(errors="replace").partition("\n")
        return next((stall for stall in _STALLS if stall.__name__ == kind), None), why


def encode_reason(failure: errors.HorovodInternalError | None, why: str) -> bytes:
    """Return what a rank leaves on the board.

    Args:
        failure: because of which it fails; None if it leaves.
        why: in words.
    """
    kind = type(failure).__name__ if failure is not None else ""
    return f"{kind}\n{why}".encode(errors="backslashreplace")
