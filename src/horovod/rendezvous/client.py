"""The job service as its clients see it: finding it, the shared table, and questions about ranks that have ended."""

from __future__ import annotations

import contextlib
import secrets
import socket as sockets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from ipaddress import ip_address
from typing import Literal

import msgspec
import zmq

from horovod.errors import InitError
from horovod.rendezvous import curve
from horovod.rendezvous.interfaces import endpoint
from horovod.rendezvous.keys import SERVICE, ports_of, purpose_key
from horovod.rendezvous.protocol import MAX_BYTES, Ask, Fate, Table, Value, number_of, pack, unpack
from horovod.rendezvous.waiting import Patience
from horovod.world import World

__all__ = [
    "FateQuery", "JobStore", "connect_first", "connected", "endpoints_of", "ports", "secret_of", "service_secret",
]  # fmt: skip

Socket = zmq.Socket[bytes]
#: Intervals: to check whether waiting has become useless, to resolve names again, and to ask again.
_LOOK_MS, _RESOLVE_S, _AGAIN_S = 100, 1.0, 0.05
_UNKNOWN = "This host cannot resolve the name: see DNS, /etc/hosts or, in Kubernetes, the headless Service"


def secret_of(world: World) -> bytes:
    """Return the secret of the member ranks of a run, for example for connections between their hosts."""
    return purpose_key(world.key, f"run {world.meeting.run}") if world.meeting.run else world.key


def service_secret(world: World) -> bytes:
    """Return the secret of the job service: one in ``horovodrun`` serves all parts of a job."""
    return world.key if world.meeting.kind == "addresses" else secret_of(world)


def ports(world: World) -> list[int]:
    """Return the ports of the service on rank 0's host; none where its endpoints are known."""
    meeting = world.meeting
    return ports_of(secret_of(world), meeting.run) if meeting.kind == "hosts" else []


def endpoints_of(world: World) -> list[str]:
    """Return the endpoints at which the job's service may listen; names are resolved now, and those of this host are
    127.0.0.1: on Debian a host's own name means 127.0.1.1, where no service listens.
    """
    places, numbers = world.meeting.places, ports(world)
    if not numbers:
        return list(places)
    found: list[str] = []
    for place in places:
        try:
            known = sockets.getaddrinfo(place, None, type=sockets.SOCK_STREAM)
        except (OSError, UnicodeError):
            continue  # not known yet, perhaps
        addresses = dict.fromkeys(str(address[0]) for *_, address in known)
        reachable = dict.fromkeys("127.0.0.1" if ip_address(each).is_loopback else each for each in addresses)
        found += [endpoint(address, port) for address in reachable for port in numbers]
    return found


def connect_first(
    context: zmq.Context[Socket],
    key: bytes,
    candidates: Callable[[], Sequence[str]],
    patience: Patience,
    nobody: str,
    max_bytes: int = MAX_BYTES,
) -> tuple[Socket, str]:
    """Connect to the first of several endpoints that proves to have the key; all are tried side by side. Return the
    DEALER, and its endpoint. ``candidates`` is called again as long as none has answered; ``nobody`` is the error
    message if none does.

    Raises:
        InitError: nobody answered in time.
    """
    probes: dict[Socket, str] = {}
    poller = zmq.Poller()
    chosen: Socket | None = None
    again_at = 0.0
    try:
        while True:
            if time.monotonic() >= again_at:
                again_at = time.monotonic() + _RESOLVE_S
                for where in set(candidates()) - set(probes.values()):
                    probe = curve.client_socket(context, key, max_bytes=max_bytes)
                    probes[probe] = where
                    probe.connect(where)
                    poller.register(probe, zmq.POLLOUT)
            patience.check()
            why = nobody if probes else f"{nobody} {_UNKNOWN}"
            patience.remind(f"an answer: {why}")
            for ready, _ in poller.poll(int(max(0.0, min(_LOOK_MS, patience.left_s * 1000)))):
                chosen = ready
                return ready, probes[ready]
            if patience.left_s <= 0:
                raise InitError(f"{why} (waited {patience.total_s:g} s, HOROVOD_START_TIMEOUT)")
    finally:
        for probe in probes:
            if probe is not chosen:
                probe.close()


@contextlib.contextmanager
def connected(
    secret: bytes, candidates: Callable[[], Sequence[str]], patience: Patience, nobody: str
) -> Iterator[tuple[Socket, str]]:
    """Connect to the job service of a secret, as ``connect_first`` does, for as long as the context lasts.

    Raises:
        InitError: nobody answered in time.
    """
    context: zmq.Context[Socket] = zmq.Context()
    try:
        yield connect_first(context, purpose_key(secret, SERVICE), candidates, patience, nobody)
    finally:
        context.destroy()


class JobStore:
    """The shared table of a job, for any thread of one rank.

    Args:
        secret: the job's secret.
        candidates: returns the endpoints of the service; the first that answers is taken.
        prefix: prefix of all keys, such as the generation.
        timeout_s: seconds for which a call waits, unless it has a limit of its own.
        check: called while this rank looks for the service; raises when waiting has become useless.
        where: an endpoint of rank 0's host, for engines that choose a network by it; the service's own when empty.
        on_close: called by ``close``, for example to end a service in this process.

    Raises:
        TimeoutError: no endpoint answered.
    """

    def __init__(
        self,
        secret: bytes,
        candidates: Callable[[], Sequence[str]],
        prefix: str = "",
        timeout_s: float = 30.0,
        check: Callable[[], None] = lambda: None,
        where: str = "",
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._lock = threading.Lock()
        self._number = secrets.randbits(32)
        self._is_closed = False
        self._prefix, self._on_close = prefix, on_close
        self.timeout_s = timeout_s
        nobody = "no job service answers"
        try:
            key = purpose_key(secret, SERVICE)
            self._socket, found = connect_first(self._context, key, candidates, Patience(timeout_s, check), nobody)
        except BaseException as error:
            self._context.destroy()
            if isinstance(error, InitError):
                raise TimeoutError(f"{nobody} at {', '.join(candidates())} within {timeout_s:g} s") from None
            raise
        self.endpoint = where or found

    def set(self, key: str, value: bytes) -> None:
        """Set the value of ``key``, for all ranks."""
        self._ask("set", key, value=value)

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """Return the value of ``key``, as soon as some rank has set it.

        Raises:
            TimeoutError: no rank has set it.
            ConnectionError: the store was closed meanwhile.
        """
        return self._ask("get", key, timeout_s=timeout_s).value

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 initially, and return the sum."""
        return self._ask("add", key, amount=amount).amount

    def check(self, key: str) -> bool:
        """Return whether ``key`` has a value."""
        return bool(self._ask("check", key).amount)

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        """Block until all ``keys`` have values.

        Raises:
            TimeoutError: a key has no value.
            ConnectionError: the store was closed meanwhile.
        """
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        for key in keys:
            self._ask("get", key, timeout_s=max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Close the connection; a thread that waits for a value gets a ConnectionError."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._lock:
            self._context.destroy()
        self._on_close()

    def _ask(
        self,
        verb: Literal["set", "get", "add", "check"],
        key: str,
        value: bytes = b"",
        amount: int = 0,
        timeout_s: float | None = None,
    ) -> Value:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while not self._lock.acquire(timeout=_LOOK_MS / 1e3):
            self._look(verb, key, deadline, limit_s)
        try:
            self._number += 1
            question = pack(Table(verb, self._prefix + key, value, amount), self._number)
            while not self._socket.poll(_LOOK_MS, zmq.POLLOUT):
                self._look(verb, key, deadline, limit_s)
            self._socket.send(question)
            while True:
                if not self._socket.poll(_LOOK_MS):
                    self._look(verb, key, deadline, limit_s)
                    continue
                data = self._socket.recv()
                # An earlier question, whose asker has given up, may still be answered.
                if number_of(data) == self._number and (answer := unpack(data, Value)) is not None:
                    return answer
        except (zmq.ZMQError, msgspec.MsgspecError) as error:
            raise ConnectionError(f"the job service cannot be asked: {error}") from None
        finally:
            self._lock.release()

    def _look(self, verb: str, key: str, deadline: float, limit_s: float) -> None:
        if self._is_closed:
            raise ConnectionError("this rank has left its job")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no answer of the job service to {verb} {key!r} within {limit_s:g} s")


class FateQuery:
    """Asks the service how a rank ended; never blocks. ``generation`` is 0 in a job that is not elastic."""

    def __init__(self, places: Sequence[str], secret: bytes, rank: int, generation: int = 0) -> None:
        self._question = pack(Ask(rank, generation))
        self._again_at = 0.0
        self._context: zmq.Context[Socket] = zmq.Context()
        self._sockets = []
        for place in places:
            socket = curve.client_socket(self._context, purpose_key(secret, SERVICE), max_bytes=MAX_BYTES)
            self._sockets.append(socket)
            socket.connect(place)

    def news(self) -> str:
        """Return how the rank ended, such as "was killed by SIGKILL"; empty as long as that is not known."""
        is_time = time.monotonic() >= self._again_at
        for socket in self._sockets:
            if is_time and socket.poll(0, zmq.POLLOUT):
                self._again_at = time.monotonic() + _AGAIN_S
                socket.send(self._question, zmq.NOBLOCK)
            while socket.poll(0):
                answer = unpack(socket.recv(), Fate)
                if answer is not None and answer.how:
                    return answer.how
        return ""

    def close(self) -> None:
        """Close the connections."""
        self._context.destroy()
