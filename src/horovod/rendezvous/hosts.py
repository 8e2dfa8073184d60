"""Lets the hosts of a job find each other, through one process of each host: its leader.

The leaders meet at the job service, which ``World.meeting`` locates. It sends them all hosts, and the endpoints of rank
0's leader. All leaders connect there, and then all go on. The connections stay open for the caller.

    prepare(world, ...)     every rank, before anything else
    ...                     the ranks of each host meet (rendezvous.host_meeting)
    meet_hosts(world, ...)  the leader of each host
    report_failure(...)     a rank whose host will not come
"""

from __future__ import annotations

import contextlib
import copy
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from horovod.errors import HorovodInternalError, InitError, PeerLostError
from horovod.launchers import LAUNCHERS
from horovod.rendezvous import curve
from horovod.rendezvous.client import connect_first, connected, endpoints_of, ports, secret_of, service_secret
from horovod.rendezvous.hosting import host_service, is_here
from horovod.rendezvous.interfaces import leading_address, own_addresses
from horovod.rendezvous.keys import SERVICE, purpose_key
from horovod.rendezvous.meetings import describe
from horovod.rendezvous.protocol import (
    AllHere,
    Connected,
    Failed,
    GiveUp,
    Go,
    HostEntry,
    Join,
    Refusal,
    StillMissing,
    pack,
    unpack,
    version_of,
)
from horovod.rendezvous.service import listen
from horovod.rendezvous.vouching import vouch
from horovod.rendezvous.waiting import Patience
from horovod.world import World

__all__ = ["MetHosts", "host_id", "meet_hosts", "prepare", "report_failure"]

#: Interval at which a waiting leader repeats its message; time for its last message.
_AGAIN_S, _LAST_MESSAGE_MS = 1.0, 500
#: After so long without a connection to the service, the job counts as ended.
_LOST_S = 10.0
#: Time for a rank to report that its host will not come.
_REPORT_S = 3.0
#: Fewest heartbeats within the silence limit; share of the limit after which a peer is lost, so that all know in time.
_BEATS, _SOONER = 5, 0.8


@dataclass(frozen=True)
class MetHosts:
    """Result of the meeting of the hosts, for a leader."""

    entries: list[HostEntry]  # the hosts, ordered by their lowest rank
    # on rank 0's host a bound ROUTER, whose peers' routing ids are `host_id`; on the others a DEALER that is connected
    # to it. The caller ends it with `socket.context.destroy()`.
    socket: zmq.Socket[bytes]
    index: int  # index of this host in `entries`
    where: str  # endpoint at which this host has reached rank 0's host; on rank 0's host, one at which it listens


def host_id(index: int) -> bytes:
    """Return the routing id of a host."""
    return b"host-%d" % index


def prepare(world: World, timeout_s: float) -> World:
    """Return ``world`` with place or secret added where the launcher does not give them, so that ranks of several hosts
    share one secret and know their places; every rank calls it first.

    Raises:
        InitError: nothing tells the ranks how to find each other, or they have no secret in common.
        PeerLostError: a rank has ended.

    Blocks, under MPI, until all ranks have called, or ``timeout_s``.
    """
    if not world.meeting.is_place_known or (world.meeting.kind == "mpi" and world.is_spread):
        from horovod.rendezvous import mpi

        return mpi.introduce(world, timeout_s)
    row = next((row for row in LAUNCHERS if row.name == world.launcher), LAUNCHERS[0])
    if row.is_vouched and not world.meeting.has_key and (world.is_spread or not world.key):
        return vouch(world, timeout_s)
    if not world.is_spread:
        return world
    ours = f"{world.size} ranks, {world.local_size} of them on this host"
    if not world.meeting.kind:
        raise InitError(f"{ours}, and nothing says where they meet: start them with horovodrun -H, mpirun or torchrun")
    if not world.meeting.has_key:
        raise InitError(
            f"{ours}: {world.launcher} gives ranks on several hosts no secret in common; type this before it, and see "
            f"that all hosts get it (pods from one Secret): export HOROVOD_SECRET_KEY=$(openssl rand -hex 32)"
        )
    return world


def report_failure(world: World, generation: int, error: HorovodInternalError) -> None:
    """Report to the other hosts that no leader of this host will come.

    Blocks until the service knows, or three seconds.
    """
    if world.meeting.kind == "addresses" and (world.launcher == "horovodrun" or world.meeting.generation):
        return  # the service knows more: how each rank ended
    refusal, patience = Refusal.of(error, ""), Patience(_REPORT_S)
    with contextlib.suppress(InitError, OSError, zmq.ZMQError):  # there is no service to report to
        if ports(world) and is_here(world):
            host_service(world)
        with connected(service_secret(world), lambda: endpoints_of(world), patience, "nobody listens") as (socket, _):
            socket.send(pack(Failed(generation, world.size, world.local_size, refusal, world.meeting.run)))
            while patience.poll(socket) and not socket.poll(0):
                pass


def meet_hosts(
    world: World,
    entry: HostEntry,
    generation: int,
    timeout_s: float,
    *,
    interfaces: Sequence[str] = (),
    check: Callable[[], None] | None = None,
    silence_s: float = 0.0,
) -> MetHosts:
    """Meet the other hosts. The leader of each host calls it; rank 0 is the leader of its host.

    Args:
        world: this process's place in the job, as ``prepare`` returns it.
        entry: this host.
        generation: counts the meetings of the job; all hosts give the same number.
        timeout_s: seconds to wait for the last host.
        interfaces: network interfaces to listen on, the best one first; all when empty.
        check: called ten times a second; raises the error that ends the wait, such as the death of a rank of this host.
        silence_s: seconds without an answer after which a connection ends, even if the other side's program is busy; 0
            is never.

    Raises:
        InitError: a host did not come in time, or does not match the others.
        PeerLostError: a rank has ended meanwhile.

    Blocks until all hosts have come, or ``timeout_s``.
    """
    own_check = check or (lambda: None)

    def check_all() -> None:
        world.meeting.check()
        own_check()

    patience = Patience(timeout_s, check_all)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    if silence_s:
        interval_s = min(1.0, silence_s / _BEATS)
        context.setsockopt(zmq.HEARTBEAT_IVL, int(interval_s * 1000))
        context.setsockopt(zmq.HEARTBEAT_TIMEOUT, int((silence_s * _SOONER - interval_s) * 1000))
    try:
        if ports(world) and world.rank == 0:
            host_service(world, interfaces)
        return _Leader(world, entry, generation, context, patience, own_addresses(interfaces)).meet()
    except OSError as error:
        context.destroy()
        raise InitError(f"{describe(entry)} cannot meet the other hosts: {error}") from error
    except BaseException:
        context.destroy()
        raise


class _Leader:
    def __init__(
        self,
        world: World,
        entry: HostEntry,
        generation: int,
        context: zmq.Context[zmq.Socket[bytes]],
        patience: Patience,
        own: Sequence[str],
    ) -> None:
        self._world, self._entry, self._generation = world, entry, generation
        self._context, self._patience, self._own = context, patience, own
        self._key = purpose_key(secret_of(world), f"control {generation}")
        self._nonce = secrets.token_bytes(16)
        self._again_at, self._reached_at = 0.0, time.monotonic()
        self._missing = "the other hosts"

    def meet(self) -> MetHosts:
        world, hub, control = self._world, None, []
        if world.rank == 0:
            hub = curve.server_socket(self._context, self._key)
            control = listen(hub, self._own)
        key = purpose_key(service_secret(world), SERVICE)
        service, where = connect_first(self._context, key, lambda: endpoints_of(world), self._patience, self._nobody())
        leading = leading_address(where).partition("%")[0]  # without a name that only this host knows
        addresses = list(dict.fromkeys(a for a in (leading, *self._own) if a))
        entry = self._entry if self._entry.addresses else msgspec.structs.replace(self._entry, addresses=addresses)
        members = world.meeting.members
        join = Join(self._generation, world.size, self._nonce, entry, control, world.meeting.run, members)
        self._reached_at = time.monotonic()
        with service:
            try:
                found = self._await_members(service, join)
                if hub is not None:
                    return self._gather(service, join, hub, found)
                return self._connect(service, join, found)
            except BaseException as error:
                self._leave(service, error)
                raise

    def _await_members(self, service: zmq.Socket[bytes], join: Join) -> AllHere:
        while True:
            for found in self._hear(service, join):
                return found
            if not self._patience.poll(service):
                raise InitError(
                    f"{self._missing} did not come to the meeting of the hosts within {self._patience.total_s:g} s "
                    f"(HOROVOD_START_TIMEOUT); {describe(self._entry)} waited"
                )

    def _hear(self, service: zmq.Socket[bytes], join: Join) -> Iterator[AllHere]:
        """Tell the service once a second that this host is here, and take its answers."""
        now = time.monotonic()
        if now >= self._again_at:
            self._again_at = now + _AGAIN_S
            if _send(service, join):
                self._reached_at = now
            elif now - self._reached_at > _LOST_S:
                raise PeerLostError(f"the job service has ended, or could not be reached for {_LOST_S:g} s")
        for data in _arrived(service):
            answer: StillMissing | AllHere | Refusal | None = unpack(data, StillMissing | AllHere | Refusal)  # type: ignore[arg-type]
            if isinstance(answer, Refusal):
                answer.enforce()
            elif isinstance(answer, AllHere) and answer.nonce == self._nonce:
                yield answer
            elif isinstance(answer, StillMissing):
                self._missing = answer.missing
                self._patience.remind(f"{answer.missing} to call init()")
            elif answer is None and (version := version_of(data)) != self._entry.version:
                raise InitError(
                    f"the job service has khorovod {version}, and {describe(self._entry)} {self._entry.version}; "
                    f"install the same version on all hosts"
                )

    def _attend(self, service: zmq.Socket[bytes], join: Join) -> None:
        """Raise if a rank of this host has ended, or the service says that a host has given up."""
        self._patience.check()
        for _ in self._hear(service, join):
            pass

    def _connect(self, service: zmq.Socket[bytes], join: Join, found: AllHere) -> MetHosts:
        """Connect to the leader of rank 0's host, and wait until all other leaders are connected, too."""
        index = next(i for i, entry in enumerate(found.entries) if self._entry.ranks[0] in entry.ranks)
        home = describe(found.entries[0])
        nobody = (
            f"{describe(self._entry)} cannot reach {home} at {', '.join(found.control)}: is a firewall in between? "
            f"--network-interfaces says which network to use"
        )
        patience = copy.copy(self._patience)
        patience.check = lambda: self._attend(service, join)
        probe, where = connect_first(self._context, self._key, lambda: found.control, patience, nobody)
        probe.close()
        socket = curve.client_socket(self._context, self._key, routing_id=host_id(index))
        socket.connect(where)
        while not socket.poll(0, zmq.POLLOUT):
            self._must_go_on(patience.poll(socket, zmq.POLLOUT), nobody)
        socket.send(pack(Connected(index, where)))
        while True:
            # The answer of rank 0 counts, even if the service says something else at the same moment.
            for data in _arrived(socket):
                if unpack(data, Go) is not None:
                    return MetHosts(found.entries, socket, index, where)
            self._attend(service, join)
            self._must_go_on(self._patience.poll(socket), f"{home} did not answer {describe(self._entry)}")

    def _gather(self, service: zmq.Socket[bytes], join: Join, hub: zmq.Socket[bytes], found: AllHere) -> MetHosts:
        """Wait, on rank 0's host, until the leaders of all other hosts are connected."""
        entries, joined = found.entries, dict[int, str]()
        while len(joined) < len(entries) - 1:
            absent = "; ".join(describe(entry) for i, entry in enumerate(entries) if i and i not in joined)
            where = f"{describe(entries[0])} at {', '.join(found.control)} (is a firewall in between?)"
            self._must_go_on(self._patience.poll(hub), f"{absent} did not connect to {where}")
            while hub.poll(0):
                sender, *data = hub.recv_multipart()
                said = unpack(data[-1], Connected)
                if said is not None and sender == host_id(said.index) and 0 < said.index < len(entries):
                    joined[said.index] = said.where
            self._attend(service, join)
        for index in joined:
            hub.send_multipart([host_id(index), pack(Go())])
        return MetHosts(entries, hub, 0, next(iter(joined.values()), ""))

    def _leave(self, service: zmq.Socket[bytes], error: BaseException) -> None:
        """Tell the hosts that wait for this host that it has given up."""
        service.linger = _LAST_MESSAGE_MS
        refusal = Refusal.of(error, f"{describe(self._entry)} has given up: {type(error).__name__}")
        _send(service, GiveUp(self._generation, self._nonce, refusal, self._world.meeting.run))

    def _must_go_on(self, has_come: bool, otherwise: str) -> None:
        if not has_come:
            raise InitError(f"{otherwise} within {self._patience.total_s:g} s (HOROVOD_START_TIMEOUT)")

    def _nobody(self) -> str:
        who, where, numbers = describe(self._entry), ", ".join(self._world.meeting.places), ports(self._world)
        if numbers:
            return (
                f"{who} found no process of this job on {where} (ports {', '.join(map(str, numbers))}): has rank "
                f"0 called init() there, is HOROVOD_SECRET_KEY the same on all hosts, and is no firewall in between?"
            )
        return (
            f"{who} cannot reach the job service at {where}: is a firewall in between? --network-interfaces says "
            f"which network to use"
        )


def _send(socket: zmq.Socket[bytes], message: Join | GiveUp) -> bool:
    try:
        socket.send(pack(message), zmq.NOBLOCK)
    except zmq.Again:
        return False  # connecting again
    return True


def _arrived(socket: zmq.Socket[bytes]) -> Iterator[bytes]:
    """Receive waiting messages one by one: messages after the last one of a meeting belong to the caller."""
    while socket.poll(0):
        yield socket.recv()
