"""The board of a host among several; closing it ends the relay first."""

from __future__ import annotations

from horovod.engine.board import TimelineSession
from horovod.links.hosts.relay import Relay
from horovod.links.shm.board import ShmBoard

__all__ = ["HostsBoard"]


class HostsBoard(ShmBoard):
    """See ``ShmBoard``."""

    relay: Relay | None = None  # the leader's relay; None on other ranks

    def set_session(self, session: TimelineSession) -> None:
        super().set_session(session)
        if self.relay is not None:
            self.relay.traces.spread()

    def close(self) -> None:
        """End the relay, and unmap the board."""
        if self.relay is not None:
            self.relay.close()
            if self.relay.doorbell is not None:
                self.relay.doorbell.close()
        super().close()
