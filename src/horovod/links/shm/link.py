"""All ranks of one host: they meet, swap descriptors, and map each other's memory."""

from __future__ import annotations

import os

from horovod.cgroups import usable_cores
from horovod.config import Config
from horovod.core.coordinator import Coordinator
from horovod.core.generation import Generation, Member
from horovod.engine.liveness import Liveness
from horovod.engine.ports import Channel, Link, Observer
from horovod.errors import InitError
from horovod.links.shm.board import ShmBoard
from horovod.links.shm.channel import CoordinatorChannel, WorkerChannel
from horovod.links.shm.doorbell import ShmDoorbell
from horovod.links.shm.peers import ShmPeers
from horovod.rendezvous import process_tree
from horovod.rendezvous.unix import meet
from horovod.transports.shm import futex
from horovod.transports.shm.arena import Arena
from horovod.transports.shm.capacity import arena_bytes
from horovod.transports.shm.control import Control
from horovod.transports.shm.mapping import create_memfd
from horovod.transports.shm.transport import ShmTransport
from horovod.world import World

__all__ = ["assemble", "connect"]


def assemble(world: World, settings: Config, number: int, observer: Observer) -> Link:
    """Meet the other ranks and return this rank's link.

    Args:
        world: who this process is.
        settings: the settings.
        number: counts the meetings of this job that came about.
        observer: knows of stalls.

    Raises:
        InitError: this machine cannot do it, or the ranks did not find each other.
        PeerLostError: another rank died meanwhile.

    Blocks until all ranks have come, or HOROVOD_START_TIMEOUT seconds.
    """
    if not futex.IS_SUPPORTED:
        raise InitError("more than one rank needs Linux on x86-64 or aarch64; elsewhere only one rank works")
    if world.local_size != world.size:
        raise InitError(
            f"{world.size} ranks, {world.local_size} of them on this host: ranks on several hosts need a transport "
            "between hosts, which this version does not have; start all ranks on one host"
        )
    nbytes = arena_bytes(settings.arena_bytes, world.size)
    control_fd = -1
    fds = [arena_fd := create_memfd("horovod-arena", nbytes)]
    try:
        if world.rank == 0:
            fds.append(control_fd := create_memfd(process_tree.control_name(world.job), ShmBoard.nbytes(world.size)))
        meeting = meet(world, arena_fd, nbytes, control_fd, settings.start_timeout_s)
        fds = list({*fds, meeting.control_fd, *meeting.arena_fds})
        # A launcher may have bound each rank to a core of its own.
        control = Control(meeting.control_fd, world.rank, world.size, usable_cores(meeting.pids))
        board = ShmBoard(meeting.control_fd, control)
        arenas = [
            Arena(fd, size, is_own=rank == world.rank)
            for rank, (fd, size) in enumerate(zip(meeting.arena_fds, meeting.arena_bytes, strict=True))
        ]
    finally:
        for fd in fds:
            os.close(fd)
    generation = Generation(list(map(Member, meeting.pids, meeting.hosts)), number=number)
    peers = ShmPeers(control, generation, meeting.pid_fds)
    return connect(generation, settings, control, board, peers, arenas, observer)


def connect(
    generation: Generation,
    settings: Config,
    control: Control,
    board: ShmBoard,
    peers: ShmPeers,
    arenas: list[Arena],
    observer: Observer,
) -> Link:
    """Return the link of a rank that shares a control page and arenas with the others.

    Args:
        generation: who takes part.
        settings: the settings.
        control: this rank's view of the control page.
        board: its view of the board.
        peers: the processes of the other ranks.
        arenas: by rank.
        observer: knows of stalls.
    """
    rank = control.rank
    coordinator: Coordinator | None = None
    channel: Channel
    if rank == generation.home:
        coordinator = Coordinator(generation, settings.fusion_threshold_bytes, max(1, settings.cache_capacity))
        channel = CoordinatorChannel(control, coordinator)
    else:
        channel = WorkerChannel(control, generation)
    transport = ShmTransport(control, arenas, Liveness(rank, generation, peers, board, observer))
    return Link(rank, generation, channel, transport, ShmDoorbell(control), coordinator, peers, board)
