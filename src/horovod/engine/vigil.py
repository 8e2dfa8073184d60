"""Looks after the other ranks, and says when there is no point in waiting for them any more."""

from __future__ import annotations

from horovod import errors
from horovod.core.mismatch import describe_waiting
from horovod.engine.channel import Channel, CoordinatorChannel
from horovod.engine.log import LogRunner
from horovod.links.shm.peers import Peers
from horovod.observe.observer import Observer
from horovod.transports.shm.control import Control, State

__all__ = ["Vigil"]

#: How long a rank that leaves may go on with the operation that it is in.
_LEAVE_S = 1.0


class Vigil:
    """See the module.

    Args:
        rank: this rank.
        control: the control page.
        peers: the processes of the other ranks.
        log: what this rank waits for.
        channel: its path to the coordinator.
        observer: knows of stalls, and what was said of ranks that are gone.
    """

    def __init__(
        self, rank: int, control: Control, peers: Peers, log: LogRunner, channel: Channel, observer: Observer
    ) -> None:
        self._rank = rank
        self._control = control
        self._peers = peers
        self._log = log
        self._channel = channel
        self._observer = observer

    def watch(self, rank: int, waited_s: float) -> None:
        """Raise when waiting for ``rank`` in the middle of an operation is pointless; see ``Watch``."""
        peers = self._peers
        lost = peers.gone()
        left = waited_s > _LEAVE_S and self._control.state_of(rank) is State.LEFT
        if lost is None and (left or peers.is_dead(rank)):
            lost = peers.culprit_of(rank)
        if lost is not None:
            raise self._lost(lost, ", in the middle of a collective")
        self._observer.in_execution(rank, waited_s)

    def tick(self, waited_s: float) -> None:
        """Raise when waiting for the log is pointless; on rank 0 also tell the coordinator who has left.

        Args:
            waited_s: how long this rank has waited, in seconds.
        """
        peers, log, channel = self._peers, self._log, self._channel
        lost = peers.gone()
        if lost is not None:
            raise self._lost(lost, self._meanwhile())
        # Who waits for nothing may go on alone.
        if self._rank and self._control.state_of(0) is State.LEFT and not log.is_idle() and not log.has_news():
            raise self._lost(peers.culprit_of(0), self._meanwhile())
        late = log.late()
        if late >= 0:
            self.watch(late, waited_s)
        self._observer.tick()
        if isinstance(channel, CoordinatorChannel):
            channel.notice_departures(lambda rank: peers.fate(rank, self._observer.verdict_of(rank)[1]))
            channel.publish()

    def _meanwhile(self) -> str:
        waiting = self._log.in_flight()
        if not waiting:
            return ""
        return f", while rank {self._rank} waited in {describe_waiting(waiting[0].signature.request)}"

    def _lost(self, rank: int, meanwhile: str) -> errors.HorovodInternalError:
        """Return what to raise because ``rank`` is gone: if a stall made it fail, then the same as there."""
        stalled, why = self._observer.verdict_of(rank)
        if stalled:
            return errors.StallError(why)
        peers = self._peers
        return errors.PeerLostError(f"{peers.fate(rank, why)}{meanwhile}", rank=rank, pid=peers.pids[rank])
