"""Detects lost ranks: those of this host as processes, those of other hosts as the leader reports."""

from __future__ import annotations

import time
from collections.abc import Sequence

from horovod.core.generation import Generation
from horovod.core.labels import LEFT as HAS_LEFT
from horovod.links.hosts.remote_ranks import DEAD, FAILED, LEFT, RemoteRanks
from horovod.links.shm.peers import ShmPeers, process_state
from horovod.transports.shm.control import Control, Presence

__all__ = ["HostsPeers"]

_POLL_S = 0.005
#: How long to wait for the news of how a rank on another host has ended.
_NEWS_S = 1.0
#: The part of the limit after which a stopped leader is given up, as other hosts do.
_SOONER = 0.8


class HostsPeers(ShmPeers):
    """The other ranks of a job on several hosts; see ``Peers``. Owns ``pid_fds`` and ``others`` from now on. The leader
    of this host may be stopped for ``timeout_s``.
    """

    def __init__(
        self,
        control: Control,
        generation: Generation,
        rank: int,
        pid_fds: Sequence[int],
        others: RemoteRanks,
        timeout_s: float,
    ) -> None:
        ranks = generation.neighbours(rank)
        super().__init__(control, generation, ranks, pid_fds)
        self._remote = others
        self._seen_lost = 0
        self._leader = ranks[0]
        self._timeout_s = timeout_s
        self._others = [other for other in range(generation.size) if other not in ranks]

    def is_alarmed(self) -> bool:
        return self._remote.lost != self._seen_lost or super().is_alarmed()

    def gone(self) -> int | None:
        self._seen_lost = self._remote.lost
        lost = super().gone()
        if lost is None and self._seen_lost:
            lost = next((self.culprit_of(rank) for rank in self._others if self._remote.state_of(rank) >= FAILED), None)
        if lost is None and self._is_leader_stopped():
            lost = self._leader
        return lost

    def has_ended(self, rank: int) -> bool:
        return super().has_ended(rank) if rank in self._indices else self._remote.state_of(rank) == DEAD

    def fate(self, rank: int, why: str = "") -> str:
        if rank == self._rank:
            return f"{self._describe(rank)} was stopped, or cut off, for so long that the other ranks have given it up"
        if rank in self._indices:
            if rank == self._leader and self._is_leader_stopped():
                return (
                    f"{self._describe(rank)} is stopped, and with it the connection of this host to the others, for "
                    f"{self._remote.silent_s:.0f} s (limit: HOROVOD_HOST_TIMEOUT={self._timeout_s:g})"
                )
            return super().fate(rank, why)
        # Another rank may have reported the loss of this one before the news of its end has come.
        self._await_state(rank, LEFT, _NEWS_S)
        state = self._remote.state_of(rank)
        if state < LEFT:
            return f"{self._describe(rank)} is lost"
        if state == FAILED:
            return f"{self._describe(rank)} failed: {why}" if why else f"{self._describe(rank)} failed"
        if state == DEAD:
            return self._remote.fate_of(rank) or f"{self._describe(rank)} died"
        return why or f"{self._describe(rank)} {HAS_LEFT}"

    def process(self, rank: int) -> tuple[str, float]:
        if rank in self._indices:
            return process_state(self._pids[rank])
        return ("X", 0.0) if self._remote.state_of(rank) == DEAD else self._remote.kernel_of(rank)

    def wait_for_end(self, rank: int, timeout_s: float) -> None:
        if rank in self._indices:
            super().wait_for_end(rank, timeout_s)
            return
        self._await_state(rank, DEAD, timeout_s)

    def close(self) -> None:
        super().close()
        self._remote.close()

    def _await_state(self, rank: int, state: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._remote.state_of(rank) < state and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _is_leader_stopped(self) -> bool:
        """Whether this host has no relay, because the process of its leader is stopped."""
        if self._rank == self._leader or self._remote.silent_s < self._timeout_s * _SOONER:
            return False
        return self._state_of(self._leader) is Presence.RUNNING and process_state(self._pids[self._leader])[0] in "Tt"

    def _state_of(self, rank: int) -> Presence:
        if rank in self._indices:
            return super()._state_of(rank)
        state = self._remote.state_of(rank)
        return Presence.FAILED if state == DEAD else Presence(state)

    def _cause_of(self, rank: int) -> int:
        return super()._cause_of(rank) if rank in self._indices else self._remote.cause_of(rank)
