"""One rank's connections to its job."""

from __future__ import annotations

from dataclasses import dataclass

from horovod.core.coordinator import Coordinator
from horovod.core.generation import Generation
from horovod.engine.board import Board
from horovod.engine.liveness import Liveness
from horovod.engine.ports import Channel, Doorbell, Peers, Transport

__all__ = ["Link"]


@dataclass(frozen=True)
class Link:
    """One rank's connections to its job."""

    rank: int  # this rank
    generation: Generation  # the members of the job
    channel: Channel  # its path to the coordinator
    transport: Transport  # moves the bytes
    doorbell: Doorbell  # lets its engine sleep
    coordinator: Coordinator | None = None  # the coordinator if it runs here, else None
    peers: Peers | None = None  # None for a rank alone
    board: Board | None = None  # None for a rank alone
    watch: Liveness | None = None  # None for a rank alone
