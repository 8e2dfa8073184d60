"""A job on several hosts as launchers start it: leaders meet where the launcher says, data moves over an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from horovod import _version
from horovod.config import Config
from horovod.engine.ports import Link, Observer, Transport, Watch
from horovod.errors import HorovodInternalError, InitError
from horovod.links.hosts import link
from horovod.links.hosts.roster import Host, Roster
from horovod.rendezvous.inquest import Inquest
from horovod.rendezvous.interfaces import endpoint, own_addresses
from horovod.rendezvous.keys import purpose_key
from horovod.rendezvous.notices import tell_hosts
from horovod.rendezvous.rally import HostOffer, host_id, rally
from horovod.rendezvous.store import StoreClient, StoreServer
from horovod.transports.between import make_transport
from horovod.transports.selection import choose, installed, wants_nccl
from horovod.transports.shm.transport import ShmTransport
from horovod.transports.topology import Topology
from horovod.world import World

__all__ = ["assemble"]


def assemble(world: World, settings: Config, number: int, observer: Observer) -> Link:
    """Meet the other ranks and return this rank's link.

    Args:
        world: who this process is, as ``rally.prepare`` says.
        settings: the settings.
        number: counts the meetings of this job that came about.
        observer: knows of stalls.

    Raises:
        InitError: this machine cannot do it, or the ranks did not find each other.
        PeerLostError: another rank died meanwhile.

    Blocks until all ranks have come, or HOROVOD_START_TIMEOUT seconds.
    """
    parts = _Parts(world, settings, number)
    try:
        return link.assemble(world, settings, number, observer, parts.meet, parts.transport, parts.tell)
    except BaseException:
        parts.close()
        raise


class _Parts:
    """What a leader needs of the other hosts, and every rank for its data."""

    def __init__(self, world: World, settings: Config, number: int) -> None:
        self._world, self._settings, self._number = world, settings, number
        self._secret = purpose_key(world.key, f"store {number}")
        self._interfaces = tuple(name.strip() for name in settings.gloo_iface.split(",") if name.strip())
        self._server: StoreServer | None = None

    def meet(self, ranks: Sequence[int], pids: Sequence[int], check: Callable[[], None]) -> link.Met:
        """Meet the leaders of the other hosts."""
        world, settings = self._world, self._settings
        if list(ranks) != sorted(ranks):
            raise InitError(
                f"the ranks of {world.hostname} are {list(ranks)} in the order of their local ranks; they must ascend"
            )
        there = installed()
        choice = choose(settings, world.launcher, True, there)
        needs_store = wants_nccl(settings, there) or (choice is not None and choice.engine != "mpi")
        if world.rank == 0 and needs_store:
            self._server = StoreServer(self._secret, [endpoint(a, "*") for a in own_addresses(self._interfaces)])
        store = self._server.endpoints if self._server is not None else []
        offer = HostOffer(world.hostname, list(ranks), list(pids), _version.__version__, store=store)
        met = rally(
            world, offer, self._number, settings.start_timeout_s,
            interfaces=self._interfaces, check=check, silence_s=settings.host_timeout_s,
        )  # fmt: skip
        hosts = [Host(offer.hostname, offer.ranks, offer.pids, offer.store) for offer in met.offers]
        places = world.meeting.places if world.meeting.kind == "addresses" else ()
        ask = (lambda rank: Inquest(places, world.key, rank)) if places else None
        return link.Met(Roster(hosts, met.index), met.socket, [host_id(index) for index in range(len(hosts))], ask)

    def tell(self, error: HorovodInternalError) -> None:
        """Let the other hosts know that nobody of this one will come."""
        tell_hosts(self._world, self._number, error)

    def transport(self, roster: Roster, shm: ShmTransport, watch: Watch) -> Transport:
        """Make what moves data."""
        world, settings = self._world, self._settings

        def open_store() -> StoreClient:
            server, self._server = self._server, None
            began_s = time.monotonic()

            def check() -> None:
                if world.rank != 0:
                    # The time counts: rank 0 may have left, and its store with it.
                    watch.check(0, time.monotonic() - began_s)

            return StoreClient(self._secret, roster.hosts[0].store, settings.start_timeout_s, check, server)

        topology = Topology(world.rank, tuple(tuple(host.ranks) for host in roster.hosts))
        try:
            return make_transport(settings, world.launcher, topology, shm, open_store, watch)
        except TimeoutError as error:
            raise InitError(f"rank {world.rank} on {world.hostname}: {error} (limit: HOROVOD_START_TIMEOUT)") from None

    def close(self) -> None:
        """Give back what was not used."""
        if self._server is not None:
            self._server.close()
