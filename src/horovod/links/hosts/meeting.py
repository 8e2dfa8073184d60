"""Joins a job on several hosts: leaders meet where the launcher says, and data moves over an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from horovod import _version
from horovod.config import Config
from horovod.engine.ports import Link, Observer, Transport, Watch
from horovod.errors import HorovodInternalError, InitError
from horovod.links.hosts import link
from horovod.links.hosts.roster import Host, Roster
from horovod.rendezvous.client import FateQuery, JobStore, endpoints_of, service_secret
from horovod.rendezvous.hosts import HostEntry, host_id, meet_hosts, report_failure
from horovod.transports.between import make_transport
from horovod.transports.hierarchical.mailbox import Mailbox
from horovod.transports.shm.transport import ShmTransport
from horovod.transports.topology import Topology
from horovod.world import World

__all__ = ["assemble"]


def assemble(world: World, settings: Config, number: int, observer: Observer) -> Link:
    """Meet the other ranks and return this rank's link; see ``renewal.assemble``."""
    parts = _Parts(world, settings, number)
    return link.assemble(world, settings, number, observer, parts.meet, parts.transport, parts.tell)


class _Parts:
    """Meets the other hosts for a leader, and makes the transport of every rank."""

    def __init__(self, world: World, settings: Config, number: int) -> None:
        self._world, self._settings, self._number = world, settings, number

    def meet(self, ranks: Sequence[int], pids: Sequence[int], check: Callable[[], None]) -> link.Met:
        """Meet the leaders of the other hosts."""
        world, settings = self._world, self._settings
        if list(ranks) != sorted(ranks):
            raise InitError(f"ranks must ascend with local ranks; host {world.hostname} has ranks {list(ranks)}")
        entry = HostEntry(world.hostname, list(ranks), list(pids), _version.__version__)
        met = meet_hosts(
            world, entry, self._number, settings.start_timeout_s,
            interfaces=tuple(name.strip() for name in settings.gloo_iface.split(",") if name.strip()),
            check=check, silence_s=settings.host_timeout_s,
        )  # fmt: skip
        hosts = [Host(entry.hostname, entry.ranks, entry.pids) for entry in met.entries]
        roster = Roster(hosts, met.index, met.where)
        knows_ends = world.launcher == "horovodrun" and world.meeting.kind == "addresses"
        members = world.meeting.members or range(world.size)
        places, generation = world.meeting.places, world.meeting.generation
        ask = (lambda rank: FateQuery(places, world.key, members[rank], generation)) if knows_ends else None
        return link.Met(roster, met.socket, [host_id(index) for index in range(len(hosts))], ask)

    def tell(self, error: HorovodInternalError) -> None:
        """Tell the other hosts that no rank of this host will come."""
        report_failure(self._world, self._number, error)

    def transport(self, roster: Roster, shm: ShmTransport, watch: Watch, mailbox: Mailbox | None) -> Transport:
        """Make the transport."""
        world, settings = self._world, self._settings

        def open_store() -> JobStore:
            began_s = time.monotonic()

            def check() -> None:
                if world.rank != 0:
                    # The time counts: rank 0 may have left, and its store with it.
                    watch.check(0, time.monotonic() - began_s)

            # Under other launchers a job has another name on each host.
            job = world.job if world.launcher == "horovodrun" else ""
            prefix = f"{job}/{world.meeting.run}/{self._number}/"
            secret, limit_s = service_secret(world), settings.start_timeout_s
            return JobStore(secret, lambda: endpoints_of(world), prefix, limit_s, check, where=roster.where)

        topology = Topology(world.rank, tuple(tuple(host.ranks) for host in roster.hosts))
        try:
            return make_transport(settings, world.launcher, topology, shm, open_store, watch, mailbox)
        except TimeoutError as error:
            raise InitError(f"rank {world.rank} on {world.hostname}: {error} (limit: HOROVOD_START_TIMEOUT)") from None
