"""Joins the ranks of several hosts: the ranks of a host meet, then the leaders meet and tell them the members."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from horovod import _version
from horovod.config import Config
from horovod.core.hub import HubCoordinator
from horovod.engine.board import TimelineSession
from horovod.engine.link import Link
from horovod.engine.liveness import Liveness
from horovod.engine.ports import Channel, Observer, Transport, Watch
from horovod.errors import HorovodInternalError, InitError, PeerLostError
from horovod.links.hosts.channel import HubDecider, LeaderChannel, RemoteDecider
from horovod.links.hosts.doorbell import WireDoorbell
from horovod.links.hosts.peers import HostsPeers
from horovod.links.hosts.relay import HUB, Relay
from horovod.links.hosts.remote_ranks import HostMemory, RemoteRanks, Roster, ended
from horovod.links.hosts.suspects import Suspects
from horovod.links.shm.board import ShmBoard
from horovod.links.shm.channel import WorkerChannel
from horovod.links.shm.doorbell import ShmDoorbell
from horovod.links.shm.link import give_up, sharing
from horovod.rendezvous.client import FateQuery, JobStore, endpoints_of, service_secret
from horovod.rendezvous.hosts import MetHosts, host_id, meet_hosts, report_failure
from horovod.rendezvous.messages import HostMeeting
from horovod.rendezvous.protocol import HostEntry, Refusal
from horovod.transports.between import make_transport
from horovod.transports.hierarchical.mailbox import Mailbox
from horovod.transports.shm.control import Control
from horovod.transports.shm.transport import ShmTransport
from horovod.transports.topology import Topology
from horovod.world import ON_HOST, World

__all__ = ["HostsBoard", "assemble"]

#: Number of a rank's threads through which awaited data comes: the engine's, and those that move it between hosts.
_THREADS = 2


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


def assemble(world: World, settings: Config, number: int, observer: Observer) -> Link:
    """Meet the other ranks and return this rank's link; see ``renewal.assemble``."""
    # Two hosts of a test may be one machine.
    own = replace(world, rank=world.local_rank, size=world.local_size, job=f"{world.job}{ON_HOST}{world.hostname}")
    page = HostsBoard.nbytes(world.local_size, world.size)
    with ExitStack() as stack:
        with _in_local_ranks(world, number):
            shared = stack.enter_context(sharing(own, settings, page + RemoteRanks.nbytes(world.size), world.rank))
        meeting = shared.meeting
        shared.control.polite = shared.control.share > _THREADS
        remote = RemoteRanks(meeting.control_fd, page, world.size)
        met: MetHosts | None = None
        try:
            if world.local_rank == 0:
                met = _lead(world, settings, number, meeting)
                roster = Roster(met.entries, met.index, met.where)
                remote.publish(roster)
            else:
                roster = remote.await_roster(meeting.pid_fds[0], settings.start_timeout_s, world.meeting.check)
        except BaseException as error:
            if world.local_rank == 0 and met is None:
                remote.publish(Refusal.of(error, f"the first rank of this host failed: {error!r}"))
            for fd in meeting.pid_fds:
                os.close(fd)
            if world.local_rank and isinstance(error, PeerLostError) and error.rank < 0:
                report_failure(world, number, error)  # in place of the leader, which has died
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
        suspects, limit_s = Suspects(_source_of_ends(world), settings.elastic), settings.host_timeout_s
        ids = [host_id(index) for index in range(len(roster.hosts))]
        relay = board.relay = Relay(generation, roster.index, host, met.socket, ids, limit_s, suspects, mailbox)
        decider: HubDecider | RemoteDecider = RemoteDecider(relay, ranks)
        if roster.index == HUB:
            coordinator = HubCoordinator(generation, settings.fusion_threshold_bytes, max(1, settings.cache_capacity))
            decider = HubDecider(coordinator, relay, ranks)
        channel = LeaderChannel(shared.control, decider, ranks)
    watch = Liveness(world.rank, generation, peers, board, observer)
    shm = ShmTransport(shared.control, shared.arenas, _Inside(ranks, watch))
    try:
        if board.relay is not None:
            board.relay.await_clock()  # before the hosts wait for each other, and so before anything is recorded
        transport = _transport_of(world, settings, number, roster, shm, watch, mailbox)
    except BaseException as error:
        give_up(board, peers, shm, world.rank, error)
        raise
    bell = _doorbell(shared.control, board.relay if len(ranks) == 1 else None)
    return Link(world.rank, generation, channel, transport, bell, coordinator, peers, board, watch)


def _doorbell(control: Control, relay: Relay | None) -> ShmDoorbell:
    """Return the doorbell of this rank; that of one that is alone on its host listens to other hosts."""
    if relay is None:
        return ShmDoorbell(control)
    relay.doorbell = WireDoorbell(control, relay.wire, relay.has_messages)
    return relay.doorbell


def _source_of_ends(world: World) -> Callable[[int], FateQuery] | None:
    """Return what makes a question to the job service about the end of a rank; None where the service knows nothing."""
    if world.launcher != "horovodrun" or world.meeting.kind != "addresses":
        return None
    places, key, generation = world.meeting.places, world.key, world.meeting.generation
    members = world.meeting.members or range(world.size)
    return lambda rank: FateQuery(places, key, members[rank], generation)


def _transport_of(
    world: World,
    settings: Config,
    number: int,
    roster: Roster,
    shm: ShmTransport,
    watch: Watch,
    mailbox: Mailbox | None,
) -> Transport:
    """Make the transport of a rank; ``mailbox`` is that of a job with one rank on each host."""

    def open_store() -> JobStore:
        began_s = time.monotonic()

        def check() -> None:
            if world.rank != 0:
                # The time counts: rank 0 may have left, and its store with it.
                watch.check(0, time.monotonic() - began_s)

        # Under other launchers a job has another name on each host.
        job = world.job if world.launcher == "horovodrun" else ""
        prefix = f"{job}/{world.meeting.run}/{number}/"
        secret, limit_s = service_secret(world), settings.start_timeout_s
        return JobStore(secret, lambda: endpoints_of(world), prefix, limit_s, check, where=roster.where)

    topology = Topology(world.rank, tuple(tuple(host.ranks) for host in roster.hosts))
    try:
        return make_transport(settings, world.launcher, topology, shm, open_store, watch, mailbox)
    except TimeoutError as error:
        raise InitError(f"rank {world.rank} on {world.hostname}: {error} (limit: HOROVOD_START_TIMEOUT)") from None


class _Inside(Watch):
    """A watch over the ranks of this host, for a transport that knows them by their local ranks."""

    def __init__(self, ranks: Sequence[int], watch: Watch) -> None:
        self._ranks = ranks
        self._watch = watch

    @property
    def is_alarmed(self) -> bool:
        return self._watch.is_alarmed

    def check(self, rank: int, waited_s: float) -> None:
        self._watch.check(self._ranks[rank], waited_s)


@contextmanager
def _in_local_ranks(world: World, number: int) -> Iterator[None]:
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
        report_failure(world, number, told)
    raise told from None


def _lead(world: World, settings: Config, number: int, meeting: HostMeeting) -> MetHosts:
    """Meet the leaders of the other hosts."""
    ranks, pids = meeting.ranks, meeting.pids
    if ranks != sorted(ranks):
        raise InitError(f"ranks must ascend with local ranks; host {world.hostname} has ranks {ranks}")

    def check() -> None:
        for index in ended(meeting.pid_fds):
            rank, pid = ranks[index], pids[index]
            raise PeerLostError(f"rank {rank} (pid {pid}) died inside init()", rank=rank, pid=pid)

    return meet_hosts(
        world, HostEntry(world.hostname, ranks, pids, _version.__version__), number, settings.start_timeout_s,
        interfaces=settings.interfaces,
        check=check, silence_s=settings.host_timeout_s,
    )  # fmt: skip
