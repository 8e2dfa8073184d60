"""How the ranks of one host find each other: one meeting on an abstract unix socket, then it is gone.

Rank 0 listens under a name made of user, job and generation, for as long as init() lasts. The name is no
file, so nothing is left behind whatever happens. Each rank speaks first: a greeting, signed with the job's
key, and its arena as a file descriptor. Rank 0 answers all of them at once, signed too, with everybody's
descriptors. A peer of another user, or without the key, gets no answer.

No replay protection is needed: nobody can listen in on a unix socket, and the kernel names the peer.
Source: unix(7), SO_PEERCRED and SCM_RIGHTS; pidfd_open(2).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import selectors
import socket
import time
from dataclasses import dataclass

import msgspec

from horovod import _version
from horovod.errors import InitError, PeerLostError
from horovod.phrases import list_ranks
from horovod.rendezvous import messages
from horovod.rendezvous.messages import DIGEST, NONCE, Answer, Hello, peer_of, sign
from horovod.world import World

__all__ = ["Meeting", "address_of", "meet"]

#: How long those who come a moment later than an error may take to hear of it.
_LINGER_S = 1.0


@dataclass
class Meeting:
    """What everybody knows after the meeting.

    Attributes:
        control_fd: the control page.
        arena_fds: each rank's arena, by rank.
        arena_bytes: each arena's size, by rank.
        pid_fds: a pidfd of each rank, by rank.
        pids: by rank.
        hosts: by rank.
    """

    control_fd: int
    arena_fds: list[int]
    arena_bytes: list[int]
    pid_fds: list[int]
    pids: list[int]
    hosts: list[str]


def address_of(job: str, generation: int) -> str:
    """Return the abstract socket name under which rank 0 of this user's job listens."""
    name = hashlib.sha256(f"{os.getuid()}/{job}/{generation}".encode()).hexdigest()[:32]
    return f"\0horovod-{name}"


def meet(world: World, generation: int, arena_fd: int, arena_bytes: int, control_fd: int, timeout_s: float) -> Meeting:
    """Meet the other ranks of this host.

    Args:
        world: who this process is.
        generation: how many meetings this job had before; equal on all ranks.
        arena_fd: this rank's arena.
        arena_bytes: its size in bytes.
        control_fd: the control page on rank 0, else -1.
        timeout_s: seconds to wait for the last rank.

    Raises:
        InitError: a rank did not come in time, or does not fit to the others.
        PeerLostError: a rank died meanwhile.

    Blocks until all ranks are here, or ``timeout_s``.
    """
    hello = Hello(world.rank, world.size, world.hostname, os.getpid(), _version.__version__, arena_bytes)
    address = address_of(world.job, generation)
    deadline = time.monotonic() + timeout_s
    if world.rank == 0:
        return _Host(world, hello, arena_fd, control_fd, address).gather(deadline, timeout_s)
    return _attend(world, hello, arena_fd, address, deadline, timeout_s)


@dataclass
class _Guest:
    connection: socket.socket
    nonce: bytes
    hello: Hello
    arena_fd: int
    pid_fd: int


class _Host:
    """Rank 0's side."""

    def __init__(self, world: World, hello: Hello, arena_fd: int, control_fd: int, address: str) -> None:
        self._world = world
        self._hello = hello
        self._arena_fd = arena_fd
        self._control_fd = control_fd
        self._guests: dict[int, _Guest] = {}
        # Also those who died since.
        self._heard: set[int] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._listener.bind(address)
        except OSError as error:
            self._listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
            raise InitError(
                f"another process already acts as rank 0 of job {world.job!r} on {world.hostname}; "
                "give each job its own HOROVOD_JOB_ID, and each process its own rank"
            ) from None
        self._selector = selectors.DefaultSelector()

    def gather(self, deadline: float, timeout_s: float) -> Meeting:
        listener, selector = self._listener, self._selector
        listener.listen(max(16, self._world.size))
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        error, lost = "", -1
        try:
            while self._is_waiting() and time.monotonic() < deadline:
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    if key.fileobj is listener:
                        self._accept()
                        continue
                    bad, rank = self._hear(key.fileobj)  # type: ignore[arg-type]
                    if bad and not error:
                        # Those who come a moment later shall hear of it, too, and not wait for nothing.
                        error, lost = bad, rank
                        deadline = min(deadline, time.monotonic() + _LINGER_S)
            if self._is_waiting() and not error:
                missing = [rank for rank in range(1, self._world.size) if rank not in self._guests]
                error = (
                    f"{list_ranks(missing)} did not call init() within {timeout_s:g} s, "
                    "the others did (HOROVOD_START_TIMEOUT or --start-timeout sets this); look at their output"
                )
            return self._answer(error, lost, max(deadline, time.monotonic() + _LINGER_S))
        finally:
            # Also of those who never spoke.
            for key in [*selector.get_map().values()]:
                key.fileobj.close()  # type: ignore[union-attr]
            selector.close()
            for guest in self._guests.values():
                guest.connection.close()

    def _is_waiting(self) -> bool:
        return len(self._heard) < self._world.size - 1

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            if peer_of(connection)[1] != os.getuid():
                connection.close()
                return
            self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> tuple[str, int]:
        """Take a greeting; return an error that ends the meeting, and the rank that was lost."""
        for guest in self._guests.values():
            if guest.connection is connection:
                self._selector.unregister(connection)
                return f"rank {guest.hello.rank} (pid {guest.hello.pid}) died inside init()", guest.hello.rank
        try:
            message, fds, flags = messages.receive(connection, messages.MAX_MESSAGE, 4)
        except OSError:
            message, fds, flags = b"", [], 0
        digest, nonce, body = message[:DIGEST], message[DIGEST : DIGEST + NONCE], message[DIGEST + NONCE :]
        genuine = hmac.compare_digest(digest, sign(self._world.key, b"rank", nonce, body))
        if not genuine or len(fds) != 1 or flags & socket.MSG_CTRUNC:
            for fd in fds:
                os.close(fd)
            self._selector.unregister(connection)
            connection.close()
            return "", -1
        hello = msgspec.msgpack.decode(body, type=Hello)
        self._heard.add(hello.rank)
        error = self._unfit(hello)
        try:
            pid_fd = os.pidfd_open(peer_of(connection)[0])
        except ProcessLookupError:
            os.close(fds[0])
            self._selector.unregister(connection)
            connection.close()
            return f"rank {hello.rank} (pid {hello.pid}) died inside init()", hello.rank
        number = hello.rank if not error else -len(self._guests) - 1
        self._guests[number] = _Guest(connection, nonce, hello, fds[0], pid_fd)
        return error, -1

    def _unfit(self, hello: Hello) -> str:
        if hello.version != self._hello.version:
            return (
                f"rank {hello.rank} runs khorovod {hello.version}, rank 0 {self._hello.version}; "
                "install one version everywhere"
            )
        if hello.size != self._hello.size:
            return f"rank {hello.rank} believes in {hello.size} ranks, rank 0 in {self._hello.size}"
        if not 0 < hello.rank < hello.size:
            return f"a process (pid {hello.pid}) came as rank {hello.rank} of {hello.size}"
        if hello.rank in self._guests:
            other = self._guests[hello.rank].hello.pid
            return f"two processes came as rank {hello.rank}: pid {other} and pid {hello.pid}"
        return ""

    def _answer(self, error: str, lost: int, deadline: float) -> Meeting:
        ranks = [self._guests[rank] for rank in range(1, self._world.size)] if not error else []
        hellos = [self._hello, *(guest.hello for guest in ranks)]
        arena_fds = [self._arena_fd, *(guest.arena_fd for guest in ranks)]
        pid_fds = [os.pidfd_open(os.getpid()), *(guest.pid_fd for guest in ranks)]
        body = msgspec.msgpack.encode(Answer([] if error else hellos, error, lost))
        fds = [] if error else [self._control_fd, *arena_fds, *pid_fds]
        for guest in self._guests.values():
            # A guest that died just now is found by its pidfd.
            with contextlib.suppress(OSError):
                guest.connection.setblocking(True)
                guest.connection.send(sign(self._world.key, b"host", guest.nonce, body) + body)
                for start in range(0, len(fds), messages.MAX_FDS):
                    messages.send_fds(guest.connection, fds[start : start + messages.MAX_FDS], deadline)
        if error:
            for guest in self._guests.values():
                os.close(guest.arena_fd)
                os.close(guest.pid_fd)
            os.close(pid_fds[0])
            _refuse(error, lost)
        return _meeting(hellos, self._control_fd, arena_fds, pid_fds)


def _attend(world: World, hello: Hello, arena_fd: int, address: str, deadline: float, timeout_s: float) -> Meeting:
    gone = f"rank 0 ended inside init(), or does not know this job's key (rank {world.rank} on {world.hostname})"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
        # Rank 0 itself keeps the time; a little more, so that its explanation arrives.
        connection.settimeout(max(0.1, deadline - time.monotonic()) + 2.0)
        _connect(connection, world, address, deadline, timeout_s)
        if peer_of(connection)[1] != os.getuid():
            raise InitError(f"a process of another user listens in place of rank 0 of job {world.job!r}")
        nonce, body = secrets.token_bytes(NONCE), msgspec.msgpack.encode(hello)
        try:
            socket.send_fds(connection, [sign(world.key, b"rank", nonce, body) + nonce + body], [arena_fd])
            message = connection.recv(1 << 20)
            if not message:
                raise PeerLostError(gone, rank=0)
            digest, answer_body = message[:DIGEST], message[DIGEST:]
            if not hmac.compare_digest(digest, sign(world.key, b"host", nonce, answer_body)):
                raise InitError("the process that answered in place of rank 0 does not know the job's key")
            answer = msgspec.msgpack.decode(answer_body, type=Answer)
            if answer.error:
                _refuse(answer.error, answer.lost)
            fds = messages.receive_fds(connection, 2 * world.size + 1, gone)
        except TimeoutError:
            raise InitError(f"rank 0 did not answer within {timeout_s:g} s; is it stopped?") from None
        except OSError:
            raise PeerLostError(gone, rank=0) from None
    return _meeting(answer.hellos, fds[0], fds[1 : world.size + 1], fds[world.size + 1 :])


def _connect(connection: socket.socket, world: World, address: str, deadline: float, timeout_s: float) -> None:
    while True:
        try:
            connection.connect(address)
            return
        except (ConnectionRefusedError, BlockingIOError):
            # An abstract name cannot be waited for; rank 0 may still be importing.
            if time.monotonic() >= deadline:
                raise InitError(
                    f"rank {world.rank} waited {timeout_s:g} s for rank 0 of job {world.job!r} on {world.hostname} "
                    "to call init() (HOROVOD_START_TIMEOUT or --start-timeout sets this); look at its output"
                ) from None
            time.sleep(messages.POLL_S)


def _refuse(error: str, lost: int) -> None:
    if lost >= 0:
        raise PeerLostError(error, rank=lost)
    raise InitError(error)


def _meeting(hellos: list[Hello], control_fd: int, arena_fds: list[int], pid_fds: list[int]) -> Meeting:
    return Meeting(
        control_fd=control_fd,
        arena_fds=arena_fds,
        arena_bytes=[hello.arena_bytes for hello in hellos],
        pid_fds=pid_fds,
        pids=[hello.pid for hello in hellos],
        hosts=[hello.host for hello in hellos],
    )
