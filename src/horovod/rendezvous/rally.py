"""How the hosts of a job find each other: one process of each, its leader, takes part.

The leaders meet where ``World.meeting`` says: at horovodrun, at rank 0's host, or through MPI. There they learn of each
other's hosts, and where rank 0's leader listens; each connects to it, and when all have, all may go on. The connections
stay, for whoever asked.

    prepare(world, ...) every rank, before anything else
    ...                 the ranks of each host meet (rendezvous.unix)
    rally(world, ...)   the leader of each host

Several addresses of one place are tried side by side; the first that shows the job's key is taken.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from horovod.errors import HorovodInternalError, InitError, PeerLostError
from horovod.rendezvous import curve
from horovod.rendezvous.book import describe
from horovod.rendezvous.interfaces import leading_address, own_addresses
from horovod.rendezvous.keys import purpose_key
from horovod.rendezvous.meeting_point import MeetingPoint, listen
from horovod.rendezvous.notices import TELL_S, ports, secret_of
from horovod.rendezvous.offers import (
    Come,
    Go,
    Gone,
    HostOffer,
    Joined,
    Refusal,
    Roster,
    Waiting,
    pack,
    unpack,
    version_of,
)
from horovod.rendezvous.probes import Patience, candidates_of, connect_first
from horovod.world import World

__all__ = ["HostOffer", "Rally", "host_id", "prepare", "rally"]

#: How often who waits repeats itself; how long the last words of who gives up may take.
_AGAIN_S, _LAST_WORDS_MS = 1.0, 500
#: How often a silent peer is called, at least; and how much sooner it is given up, so that all hear of it in time.
_BEATS, _SOONER = 5, 0.8


@dataclass(frozen=True)
class Rally:
    """What a leader knows after the meeting of the hosts.

    Attributes:
        offers: by their lowest rank.
        socket: on rank 0's host a bound ROUTER, whose peers' routing ids are ``host_id``; on the others a DEALER
            that is connected to it. The caller ends it with ``curve.terminate(socket.context)``.
        index: of this host in ``offers``.
        address: of this host, under which the others reach it.
    """

    offers: list[HostOffer]
    socket: zmq.Socket[bytes]
    index: int
    address: str


def host_id(index: int) -> bytes:
    """Return the routing id of a host."""
    return b"host-%d" % index


def prepare(world: World, timeout_s: float) -> World:
    """See that all ranks of several hosts have one secret, and know their places; every rank calls it first.

    Args:
        world: what the launcher says.
        timeout_s: seconds to wait for the last rank.

    Returns:
        The same, or what MPI knows better.

    Raises:
        InitError: nobody has told the ranks how to find each other, or they have no secret in common.
        PeerLostError: a rank has ended.

    Blocks, under MPI, until all ranks have called, or ``timeout_s``.
    """
    if not world.meeting.is_place_known or (world.meeting.kind == "mpi" and world.is_spread):
        from horovod.rendezvous import mpi

        return mpi.introduce(world, timeout_s)
    if not world.is_spread:
        return world
    ours = f"{world.size} ranks, {world.local_size} of them on this host"
    if not world.meeting.kind:
        raise InitError(f"{ours}, and nothing says where they meet: start them with horovodrun -H, mpirun or torchrun")
    if not world.meeting.has_key:
        raise InitError(
            f"{ours}: {world.launcher} gives ranks on several hosts no secret in common; type this before it, and see "
            f"that all hosts get it: export HOROVOD_SECRET_KEY=$(openssl rand -hex 32)"
        )
    return world


def rally(
    world: World,
    offer: HostOffer,
    number: int,
    timeout_s: float,
    *,
    interfaces: Sequence[str] = (),
    check: Callable[[], None] | None = None,
    silence_s: float = 0.0,
) -> Rally:
    """Meet the other hosts. The leader of each host calls it; rank 0 is the leader of its host.

    Args:
        world: who this process is, as ``prepare`` says.
        offer: this host.
        number: of the meeting; all hosts give the same.
        timeout_s: seconds to wait for the last host.
        interfaces: network interfaces to listen on, the best one first; all when empty.
        check: called ten times a second; raises what ends the waiting, such as that a rank of this host has died.
        silence_s: the connections end when the other side has not answered for so many seconds, whatever its program
            does meanwhile; 0 is never.

    Raises:
        InitError: a host did not come in time, or does not fit to the others.
        PeerLostError: a rank has ended meanwhile.

    Blocks until all hosts have come, or ``timeout_s``.
    """
    patience = Patience(time.monotonic() + timeout_s, timeout_s, check or (lambda: None))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    if silence_s:
        interval_s = min(1.0, silence_s / _BEATS)
        context.setsockopt(zmq.HEARTBEAT_IVL, int(interval_s * 1000))
        context.setsockopt(zmq.HEARTBEAT_TIMEOUT, int((silence_s * _SOONER - interval_s) * 1000))
    try:
        return _Leader(world, offer, number, context, patience, interfaces).meet()
    except OSError as error:
        curve.terminate(context)
        raise InitError(f"{describe(offer)} cannot meet the other hosts: {error}") from error
    except BaseException:
        curve.terminate(context)
        raise


class _Leader:
    def __init__(
        self,
        world: World,
        offer: HostOffer,
        number: int,
        context: zmq.Context[zmq.Socket[bytes]],
        patience: Patience,
        interfaces: Sequence[str],
    ) -> None:
        self._world, self._offer, self._number = world, offer, number
        self._context, self._patience = context, patience
        self._own = own_addresses(interfaces)
        self._secret = secret_of(world)
        self._nonce = secrets.token_bytes(16)

    def meet(self) -> Rally:
        point = self._point()
        try:
            return self._meet(point)
        finally:
            if point is not None:
                if point.has_failed:
                    point.await_told(TELL_S)
                point.close()

    def _point(self) -> MeetingPoint | None:
        """Rank 0's host is where the hosts meet, if there is no better place."""
        meeting = self._world.meeting
        if meeting.kind != "hosts" or self._world.rank != 0:
            return None
        return MeetingPoint(self._secret, [*self._own, "127.0.0.1"], ports(self._world))

    def _meet(self, point: MeetingPoint | None) -> Rally:
        socket, control = None, []
        key = purpose_key(self._secret, f"control {self._number}")
        if self._world.rank == 0:
            socket = curve.server_socket(self._context, key)
            control = listen(socket, self._own)
        roster = self._roster(control, point)
        index = next(i for i, offer in enumerate(roster.offers) if self._offer.ranks[0] in offer.ranks)
        if socket is not None:
            return self._gather(socket, roster.offers)
        return self._join(key, roster, index)

    def _roster(self, control: list[str], point: MeetingPoint | None) -> Roster:
        meeting = self._world.meeting
        if meeting.kind == "mpi":
            from horovod.rendezvous import mpi

            return mpi.exchange(self._world, self._come(control, self._own[0]), self._patience)
        if point is not None:
            return self._ask(point.endpoints, control)
        return self._ask(meeting.places, control, ports(self._world))

    def _come(self, control: list[str], leading: str) -> Come:
        addresses = list(dict.fromkeys(address for address in (leading, *self._own) if address))
        offer = self._offer if self._offer.addresses else msgspec.structs.replace(self._offer, addresses=addresses)
        return Come(self._number, self._world.size, self._nonce, offer, control)

    def _ask(self, places: Sequence[str], control: list[str], ports: Sequence[int] = ()) -> Roster:
        """Have the meeting point tell who takes part."""
        socket, where = connect_first(
            self._context,
            purpose_key(self._secret, "meeting"),
            lambda: candidates_of(places, ports),
            self._patience,
            self._nobody(places, ports),
        )
        with socket:
            try:
                return self._answer(socket, self._come(control, leading_address(where)))
            except BaseException as error:
                lost = error.rank if isinstance(error, PeerLostError) else -1
                _last_words(socket, Gone(self._number, self._nonce, self._regret(error), lost))
                raise

    def _answer(self, socket: zmq.Socket[bytes], come: Come) -> Roster:
        missing, again_at = "the other hosts", 0.0
        while True:
            if time.monotonic() >= again_at:
                again_at = time.monotonic() + _AGAIN_S
                _send(socket, come)
                self._patience.remind(f"{missing} to call init()")
            if not self._patience.poll(socket):
                raise InitError(
                    f"{missing} did not come to the meeting of the hosts within {self._patience.total_s:g} s "
                    f"(HOROVOD_START_TIMEOUT); {describe(self._offer)} waited"
                )
            for data in _arrived(socket):
                answer: Waiting | Roster | Refusal | None = unpack(data, Waiting | Roster | Refusal)  # type: ignore[arg-type]
                if isinstance(answer, Refusal):
                    answer.enforce()
                elif isinstance(answer, Roster) and answer.nonce == self._nonce:
                    return answer
                elif isinstance(answer, Waiting):
                    missing = answer.missing
                elif answer is None and (version := version_of(data)) != self._offer.version:
                    raise InitError(
                        f"the place where hosts meet has khorovod {version}, and {describe(self._offer)} "
                        f"{self._offer.version}; install the same version on all"
                    )

    def _join(self, key: bytes, roster: Roster, index: int) -> Rally:
        """Connect to the leader of rank 0."""
        nobody = (
            f"{describe(self._offer)} cannot reach {describe(roster.offers[0])} at {', '.join(roster.control)}: is a "
            f"firewall in between? --network-interfaces says which network to use"
        )
        probe, where = connect_first(
            self._context, key, lambda: candidates_of(roster.control, ()), self._patience, nobody
        )
        probe.close()
        socket = curve.client_socket(self._context, key, routing_id=host_id(index))
        socket.connect(where)
        try:
            while not socket.poll(0, zmq.POLLOUT):
                self._must_go_on(self._patience.poll(socket, zmq.POLLOUT), nobody)
            socket.send(pack(Joined(index, where)))
            while True:
                self._must_go_on(
                    self._patience.poll(socket), f"{describe(roster.offers[0])} did not answer {describe(self._offer)}"
                )
                for data in _arrived(socket):
                    answer: Go | Refusal | None = unpack(data, Go | Refusal)  # type: ignore[arg-type]
                    if isinstance(answer, Refusal):
                        answer.enforce()
                    if isinstance(answer, Go):
                        return Rally(roster.offers, socket, index, leading_address(where))
        except BaseException as error:
            lost = error.rank if isinstance(error, PeerLostError) else -1
            _last_words(socket, Gone(self._number, self._nonce, self._regret(error), lost))
            raise

    def _gather(self, socket: zmq.Socket[bytes], offers: list[HostOffer]) -> Rally:
        """On rank 0's host: wait until the leaders of all others are connected."""
        joined: dict[int, str] = {}
        try:
            while len(joined) < len(offers) - 1:
                absent = [offer for i, offer in enumerate(offers) if i and i not in joined]
                self._must_go_on(
                    self._patience.poll(socket),
                    f"{'; '.join(map(describe, absent))} did not connect to {describe(offers[0])}",
                )
                while socket.poll(0):
                    sender, *data = socket.recv_multipart()
                    said: Joined | Gone | None = unpack(data[-1], Joined | Gone)  # type: ignore[arg-type]
                    if isinstance(said, Gone):
                        Refusal(said.error, said.lost).enforce()
                    if isinstance(said, Joined) and sender == host_id(said.index) and 0 < said.index < len(offers):
                        joined[said.index] = said.where
        except BaseException as error:
            lost = error.rank if isinstance(error, PeerLostError) else -1
            curve.part(socket, map(host_id, joined), pack(Refusal(self._regret(error), lost)))
            raise
        for index in joined:
            socket.send_multipart([host_id(index), pack(Go())])
        where = next(iter(joined.values()), "")
        address = where.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        return Rally(offers, socket, 0, address or self._own[0])

    def _must_go_on(self, has_come: bool, otherwise: str) -> None:
        if not has_come:
            raise InitError(f"{otherwise} within {self._patience.total_s:g} s (HOROVOD_START_TIMEOUT)")

    def _regret(self, error: BaseException) -> str:
        if isinstance(error, HorovodInternalError):
            return str(error)
        return f"{describe(self._offer)} has given up: {type(error).__name__}"

    def _nobody(self, places: Sequence[str], ports: Sequence[int]) -> str:
        who = describe(self._offer)
        if ports:
            return (
                f"{who} found nobody of this job on {', '.join(places)} (ports {', '.join(map(str, ports))}): has rank "
                f"0 called init() there, is HOROVOD_SECRET_KEY the same on all hosts, and is no firewall in between?"
            )
        return (
            f"{who} cannot reach horovodrun at {', '.join(places)}: is a firewall in between? --network-interfaces "
            f"says which network to use"
        )


def _send(socket: zmq.Socket[bytes], message: Come | Gone) -> None:
    try:
        socket.send(pack(message), zmq.NOBLOCK)
    except zmq.Again:
        pass  # connecting again


def _last_words(socket: zmq.Socket[bytes], message: Gone) -> None:
    socket.linger = _LAST_WORDS_MS
    _send(socket, message)


def _arrived(socket: zmq.Socket[bytes]) -> Iterator[bytes]:
    """Receive what has come, one by one: what comes after the last word of a meeting is not the meeting's."""
    while socket.poll(0):
        yield socket.recv()
