"""Joins the ranks of several hosts: the ranks of a host meet, then the leaders meet and tell them the members."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import zmq

from horovod.config import Config
from horovod.core.hub import HubCoordinator
from horovod.engine.liveness import Liveness
from horovod.engine.ports import Channel, Link, Observer, Transport, Watch
from horovod.errors import HorovodInternalError, InitError, PeerLostError
from horovod.links.hosts.board import HostsBoard
from horovod.links.hosts.channel import HubDecider, LeaderChannel, RemoteDecider
from horovod.links.hosts.doorbell import WireDoorbell
from horovod.links.hosts.peers import HostsPeers
from horovod.links.hosts.relay import HUB, Relay
from horovod.links.hosts.remote_ranks import HostMemory, RemoteRanks
from horovod.links.hosts.roster import Roster, await_places, await_roster, ended, publish, publish_refusal
from horovod.links.hosts.suspects import Source, Suspects
from horovod.links.shm.channel import WorkerChannel
from horovod.links.shm.doorbell import ShmDoorbell
from horovod.links.shm.link import give_up, sharing
from horovod.rendezvous.messages import HostMeeting
from horovod.transports.hierarchical.mailbox import Mailbox
from horovod.transports.shm.control import Control
from horovod.transports.shm.transport import ShmTransport
from horovod.world import ON_HOST, World

__all__ = ["MakeTransport", "MeetHosts", "Met", "assemble"]

#: Number of a rank's threads through which awaited data comes: the engine's, and those that move it between hosts.
_THREADS = 2


@dataclass(frozen=True)
class Met:
    """The result of the meeting of the hosts, for a leader.

    Attributes:
        roster: the ranks of the job.
        socket: at rank 0's host a ROUTER, elsewhere a DEALER that is connected with it.
        ids: routing ids of the leaders, by host.
        ask: returns a source that may know how a rank ended; None if there is no source.
    """

    roster: Roster
    socket: zmq.Socket[bytes]
    ids: Sequence[bytes]
    ask: Callable[[int], Source] | None = None


#: Meets the other leaders. Takes the ranks of this host, their process ids, and a check that raises when one has ended.
MeetHosts = Callable[[Sequence[int], Sequence[int], Callable[[], None]], Met]
#: Makes the transport of a rank. Takes the roster, the transport inside this host, a watch over all ranks, and the
#: mailbox of a job with one rank on each host.
MakeTransport = Callable[[Roster, ShmTransport, Watch, Mailbox | None], Transport]


def assemble(
    world: World,
    settings: Config,
    number: int,
    observer: Observer,
    meet: MeetHosts,
    make_transport: MakeTransport,
    tell: Callable[[HorovodInternalError], None] = lambda error: None,
) -> Link:
    """Meet the other ranks and return this rank's link; see ``renewal.assemble``.

    Args:
        world: the place of this process in the job.
        settings: the settings.
        number: counts the successful meetings of this job.
        observer: detects stalls.
        meet: meets the other hosts, called by the leader.
        make_transport: makes the transport.
        tell: tells the other hosts that no rank of this host will come.
    """
    # Two hosts of a test may be one machine.
    own = replace(world, rank=world.local_rank, size=world.local_size, job=f"{world.job}{ON_HOST}{world.hostname}")
    page = HostsBoard.nbytes(world.local_size, world.size)
    with ExitStack() as stack:
        with _in_local_ranks(world, tell):
            shared = stack.enter_context(sharing(own, settings, page + _remote_bytes(world)))
        meeting = shared.meeting
        shared.control.polite = shared.control.share > _THREADS
        remote = RemoteRanks(meeting.control_fd, page, world.local_size, world.size)
        remote.come(world.local_rank, world.rank)
        met: Met | None = None
        try:
            if world.local_rank == 0:
                met = _lead(remote, meeting, settings.start_timeout_s, meet, world.meeting.check)
                roster = met.roster
            else:
                roster = await_roster(remote, meeting.pid_fds[0], settings.start_timeout_s, world.meeting.check)
        except BaseException as error:
            _withdraw(world, meeting, error, tell)
            raise
        generation = roster.generation(number)
        ranks = generation.neighbours(world.rank)
        indices = [ranks.index(rank) if rank in ranks else 0 for rank in range(world.size)]
        board = HostsBoard(meeting.control_fd, shared.control, world.rank, indices)
    peers = HostsPeers(shared.control, generation, world.rank, meeting.pid_fds, remote, settings.host_timeout_s)
    coordinator: HubCoordinator | None = None
    channel: Channel = WorkerChannel(shared.control)
    mailbox = Mailbox(world.rank, world.size) if len(generation.hosts) == world.size else None
    if met is not None:
        host = HostMemory(shared.control, board, remote, peers)
        suspects, limit_s = Suspects(met.ask, settings.elastic), settings.host_timeout_s
        relay = board.relay = Relay(generation, roster.index, host, met.socket, met.ids, limit_s, suspects, mailbox)
        decider: HubDecider | RemoteDecider = RemoteDecider(relay, ranks)
        if roster.index == HUB:
            coordinator = HubCoordinator(generation, settings.fusion_threshold_bytes, max(1, settings.cache_capacity))
            decider = HubDecider(coordinator, relay, ranks)
        channel = LeaderChannel(shared.control, decider, ranks)
    watch = Liveness(world.rank, generation, peers, board, observer)
    try:
        shm = ShmTransport(shared.control, shared.arenas, _Inside(ranks, watch))
        if board.relay is not None:
            board.relay.await_clock()  # before the hosts wait for each other, and so before anything is recorded
        transport = make_transport(roster, shm, watch, mailbox)
    except BaseException as error:
        give_up(board, peers, world.rank, error)
        board.close()
        peers.close()
        raise
    bell = _doorbell(shared.control, board.relay if len(ranks) == 1 else None)
    return Link(world.rank, generation, channel, transport, bell, coordinator, peers, board, watch)


def _remote_bytes(world: World) -> int:
    """Return the bytes that the table of ranks on other hosts takes."""
    return RemoteRanks.nbytes(world.local_size, world.size)


def _doorbell(control: Control, relay: Relay | None) -> ShmDoorbell:
    """Return the doorbell of this rank; that of one that is alone on its host listens to other hosts."""
    if relay is None:
        return ShmDoorbell(control)
    relay.doorbell = WireDoorbell(control, relay.wire, relay.has_messages)
    return relay.doorbell


def _withdraw(
    world: World, meeting: HostMeeting, error: BaseException, tell: Callable[[HorovodInternalError], None]
) -> None:  # fmt: skip
    """Close the pidfds of this host; if its leader has died, tell the other hosts in its place."""
    for fd in meeting.pid_fds:
        os.close(fd)
    if world.local_rank and isinstance(error, PeerLostError) and error.rank < 0:
        tell(error)


class _Inside:
    """A watch over the ranks of this host, for a transport that knows them by their local ranks.

    Args:
        ranks: the ranks of this host, by local rank.
        watch: the watch over all ranks.
    """

    def __init__(self, ranks: Sequence[int], watch: Watch) -> None:
        self._ranks = ranks
        self._watch = watch

    @property
    def is_alarmed(self) -> bool:
        """See ``Watch``."""
        return self._watch.is_alarmed

    def check(self, rank: int, waited_s: float) -> None:
        """Raise when waiting for a local rank is pointless; see ``Watch``."""
        self._watch.check(self._ranks[rank], waited_s)


@contextmanager
def _in_local_ranks(world: World, tell: Callable[[HorovodInternalError], None]) -> Iterator[None]:
    """Mark local ranks in errors of this host's meeting; its first rank tells the other hosts, or all if it is lost."""
    where = f"on host {world.hostname}, by local rank"
    told: HorovodInternalError
    try:
        yield
        return
    except PeerLostError as error:
        told, is_first_lost = PeerLostError(f"{where}: {error}", pid=error.pid), error.rank == 0
    except InitError as error:
        told, is_first_lost = InitError(f"{where}: {error}"), False
    if world.local_rank == 0 or is_first_lost:
        tell(told)
    raise told


def _lead(
    remote: RemoteRanks, meeting: HostMeeting, timeout_s: float, meet: MeetHosts, go_on: Callable[[], None]
) -> Met:
    """Meet the other hosts, and tell the ranks of this one."""
    try:
        ranks = await_places(remote, meeting.pid_fds, timeout_s, go_on)

        def check() -> None:
            for index in ended(meeting.pid_fds):
                pid = meeting.pids[index]
                raise PeerLostError(f"rank {ranks[index]} (pid {pid}) died inside init()", rank=ranks[index], pid=pid)

        met = meet(ranks, meeting.pids, check)
    except BaseException as error:
        publish_refusal(remote, error)
        raise
    publish(remote, met.roster)
    return met
