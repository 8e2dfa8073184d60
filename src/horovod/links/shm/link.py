"""All ranks of one host: they meet, swap descriptors, and map each other's memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from horovod.cgroups import usable_cores
from horovod.config import Config
from horovod.core.coordinator import Coordinator
from horovod.core.generation import Generation, Member
from horovod.engine.link import Link
from horovod.engine.liveness import Liveness, encode_reason
from horovod.engine.ports import Channel, Observer
from horovod.errors import HorovodInternalError, InitError, PeerLostError
from horovod.links.shm.board import ShmBoard
from horovod.links.shm.channel import CoordinatorChannel, WorkerChannel
from horovod.links.shm.doorbell import ShmDoorbell
from horovod.links.shm.peers import ShmPeers
from horovod.rendezvous import process_tree
from horovod.rendezvous.host_meeting import meet
from horovod.rendezvous.messages import HostMeeting
from horovod.transports.between import make_transport
from horovod.transports.shm import futex
from horovod.transports.shm.arena import Arena
from horovod.transports.shm.capacity import arena_bytes
from horovod.transports.shm.control import Control
from horovod.transports.shm.mapping import create_memfd
from horovod.transports.shm.transport import ShmTransport
from horovod.transports.topology import Topology
from horovod.world import World

if TYPE_CHECKING:
    from horovod.rendezvous.client import JobStore

__all__ = ["Shared", "assemble", "give_up", "sharing"]


class Shared(NamedTuple):
    """Memory and descriptors that the ranks of a host share."""

    # the ranks; descriptors of memory are open while `sharing` lasts, those of processes stay open
    meeting: HostMeeting
    control: Control  # this rank's view of the control page
    arenas: list[Arena]  # in the order of the control page


def assemble(world: World, settings: Config, number: int, observer: Observer) -> Link:
    """Meet the other ranks and return this rank's link; see ``renewal.assemble``."""
    ranks = range(world.size)
    with sharing(world, settings, ShmBoard.nbytes(world.size, world.size), world.rank) as (meeting, control, arenas):
        board = ShmBoard(meeting.control_fd, control, world.rank, ranks)
    generation = Generation(list(map(Member, meeting.pids, meeting.hosts)), number=number)
    peers = ShmPeers(control, generation, ranks, meeting.pid_fds)
    coordinator: Coordinator | None = None
    channel: Channel
    if world.rank == 0:
        coordinator = Coordinator(generation, settings.fusion_threshold_bytes, max(1, settings.cache_capacity))
        channel = CoordinatorChannel(control, coordinator, ranks)
    else:
        channel = WorkerChannel(control)
    watch = Liveness(world.rank, generation, peers, board, observer)
    shm = ShmTransport(control, arenas, watch)

    def check() -> None:
        if world.rank != 0:
            # A rank that has left is in no operation, so it gets no time to finish one.
            watch.check(0, math.inf if peers.has_left(0) else 0.0)

    try:
        # The user may have named an engine to use instead.
        topology, open_store = topology_of(world), lambda: local_store(world, number, settings.start_timeout_s, check)
        transport = make_transport(settings, world.launcher, topology, shm, open_store, watch)
    except BaseException as error:
        give_up(board, peers, shm, world.rank, error)
        raise
    return Link(world.rank, generation, channel, transport, ShmDoorbell(control), coordinator, peers, board, watch)


def give_up(board: ShmBoard, peers: ShmPeers, shm: ShmTransport, rank: int, error: BaseException) -> None:
    """Publish that this rank's ``init()`` fails after all have met, and why, so that no rank waits for it. Then release
    what the ranks share.
    """
    if not isinstance(error, HorovodInternalError):
        error = HorovodInternalError(f"init() ended with {error!r}")
    board.give_reason(encode_reason(error, str(error)))
    culprit = error.rank if isinstance(error, PeerLostError) else rank
    peers.fail(culprit if culprit >= 0 else rank)
    board.close()
    peers.close()
    shm.close()


def topology_of(world: World) -> Topology:
    """Return the topology of a job on one host."""
    return Topology(world.rank, (tuple(range(world.size)),))


def local_store(world: World, number: int, timeout_s: float, check: Callable[[], None]) -> JobStore:
    """Return the store of a job on one host; rank 0 holds it. An error that ``check`` raises ends the wait."""
    # ZeroMQ takes a while to load, and few jobs on one host need it.
    from horovod.rendezvous.client import JobStore
    from horovod.rendezvous.keys import local_name
    from horovod.rendezvous.service import Service

    address = local_name(world.key, f"{world.job} {number}")
    close = Service(world.key, [address]).close if world.rank == 0 else lambda: None
    return JobStore(world.key, lambda: [address], "", timeout_s, check, on_close=close)


@contextmanager
def sharing(world: World, settings: Config, page_bytes: int, rank_in_job: int) -> Iterator[Shared]:
    """Meet the other ranks of this host, and map the memory that they share. ``world`` is the place among these ranks;
    the memfd that begins with the control page has ``page_bytes``.

    Raises:
        InitError: this machine lacks a requirement, or the ranks did not find each other.
        PeerLostError: another rank died meanwhile.

    Blocks until all of them have come, or HOROVOD_START_TIMEOUT seconds.
    """
    if not futex.IS_SUPPORTED:
        raise InitError("more than one rank needs Linux on x86-64 or aarch64; elsewhere only one rank works")
    nbytes = arena_bytes(settings.arena_bytes, world.size)
    control_fd = -1
    fds = [arena_fd := create_memfd("horovod-arena", nbytes)]
    try:
        if world.rank == 0:
            fds.append(control_fd := create_memfd(process_tree.control_name(world.job), page_bytes))
        meeting = meet(world, arena_fd, nbytes, control_fd, settings.start_timeout_s, rank_in_job)
        fds = list({*fds, meeting.control_fd, *meeting.arena_fds})
        control = Control(meeting.control_fd, world.rank, world.size, usable_cores(meeting.pids))
        arenas = [Arena(fd, size) for fd, size in zip(meeting.arena_fds, meeting.arena_bytes, strict=True)]
        yield Shared(meeting, control, arenas)
    finally:
        for fd in fds:
            os.close(fd)
