"""Messages between the ranks of a host when they meet, and the descriptors that travel with them.

    rank to rank 0   greeting, with its arena                 Verdict: it has everything
    rank 0 to rank                   welcome   MeetingResult, descriptors                 Verdict: all have

Greeting, welcome and result are signed with the job's key; a greeting brings a nonce, which the signatures of the
answers cover. A welcome comes at once, so that no rank waits long for a stranger that listens in silence.
Source: unix(7), SO_PEERCRED and SCM_RIGHTS.
"""

from __future__ import annotations

import array
import contextlib
import errno
import hmac
import os
import resource
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from horovod.errors import InitError, PeerLostError

__all__ = [
    "CHECK_S",
    "FDS",
    "MAX_ANSWER",
    "MAX_FDS",
    "MAX_GREETING",
    "OUT_OF_FILES",
    "POLL_S",
    "Greeting",
    "HostMeeting",
    "MeetingResult",
    "Verdict",
    "await_message",
    "check_files",
    "explained",
    "nonce",
    "peer_of",
    "read",
    "receive",
    "receive_fds",
    "sealed",
    "send_fds",
    "sign",
    "too_many_files",
]

#: Largest sizes of a greeting, and of an answer to many ranks, in bytes.
MAX_GREETING, MAX_ANSWER = 64 << 10, 1 << 20
_NONCE, _DIGEST = 16, 32
#: Descriptors in one message.
MAX_FDS = 200
#: Text of the messages that carry descriptors.
FDS = b"fds"
#: Intervals: to retry operations that cannot be polled, and to check whether a meeting was cancelled.
POLL_S, CHECK_S = 0.002, 0.02
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
"""Errors of a lack of descriptors: in this process, or on this machine."""
_CREDENTIALS = struct.Struct("3i")


@dataclass
class HostMeeting:
    """Result of the meeting, the same for all ranks of a host."""

    control_fd: int  # the control page
    arena_fds: list[int]  # each rank's arena, by rank
    arena_bytes: list[int]  # each arena's size, by rank
    pid_fds: list[int]  # a pidfd of each rank, by rank
    pids: list[int]  # process ids, by rank
    hosts: list[str]  # host names, by rank
    ranks: list[int]  # ranks in the job, by rank on this host

    @classmethod
    def of(cls, hellos: list[Greeting], control_fd: int, arena_fds: list[int], pid_fds: list[int]) -> HostMeeting:
        """Return the result that the greetings and the descriptors give."""
        sizes, pids = [hello.arena_bytes for hello in hellos], [hello.pid for hello in hellos]
        hosts, ranks = [hello.host for hello in hellos], [hello.rank_in_job for hello in hellos]
        return cls(control_fd, arena_fds, sizes, pid_fds, pids, hosts, ranks)


class Greeting(msgspec.Struct, array_like=True, frozen=True):
    """A rank's greeting."""

    rank: int
    size: int
    host: str
    pid: int
    version: str  # version of this package
    arena_bytes: int
    rank_in_job: int  # its rank in the job, which may run on other hosts, too


class MeetingResult(msgspec.Struct, array_like=True, frozen=True):
    """Rank 0's answer to all ranks."""

    hellos: list[Greeting]  # all greetings, by rank
    verdict: Verdict  # whether there is a job


class Verdict(msgspec.Struct, array_like=True, frozen=True):
    """Whether a meeting succeeded: each rank reports whether it received everything, then rank 0 decides for all."""

    error: str = ""  # why there is no job; empty when there is one
    lost: int = -1  # the rank whose death is the reason, else -1
    is_loss: bool = False  # whether the reason is the death of an unknown rank

    def enforce(self) -> None:
        """Raise the error, if there is one.

        Raises:
            PeerLostError: a rank died.
            InitError: there is no job for another reason.
        """
        if self.lost >= 0 or self.is_loss:
            raise PeerLostError(self.error, rank=self.lost)
        if self.error:
            raise InitError(self.error)


def nonce() -> bytes:
    """Return a nonce for a greeting; the signature of the answer covers it."""
    return secrets.token_bytes(_NONCE)


def sign(key: bytes, role: bytes, nonce: bytes, body: bytes = b"") -> bytes:
    """Return the signature of a message; ``role`` of its sender is "rank", "probe", "welcome" or "host"."""
    return hmac.digest(key, role + nonce + body, "sha256")


def sealed(key: bytes, role: bytes, nonce: bytes, body: bytes = b"") -> bytes:
    """Return a first message: signature, nonce, body."""
    return sign(key, role, nonce, body) + nonce + body


def read(key: bytes, message: bytes) -> tuple[bytes, bytes, bytes]:
    """Return (role, nonce, body) of a first message; the role is empty when it is not signed with the key."""
    digest, nonce, body = message[:_DIGEST], message[_DIGEST : _DIGEST + _NONCE], message[_DIGEST + _NONCE :]
    for role in (b"rank", b"probe"):
        if hmac.compare_digest(digest, sign(key, role, nonce, body)):
            return role, nonce, body
    return b"", b"", b""


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the other end, from the kernel."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def await_message(connection: socket.socket, nbytes: int, deadline: float, check: Callable[[], None]) -> bytes:
    """Return the next message; empty when the other side has gone. ``check`` raises an error when waiting has become
    useless.

    Raises:
        TimeoutError: nothing came.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while not poll.poll(CHECK_S * 1000):
        check()
        if time.monotonic() >= deadline:
            raise TimeoutError
    return connection.recv(nbytes)


def receive(connection: socket.socket, nbytes: int, max_fds: int) -> tuple[bytes, list[int], int]:
    """Return (message, descriptors, flags); ``socket.recv_fds`` would let children inherit the descriptors."""
    fds = array.array("i")
    room = socket.CMSG_LEN(max_fds * fds.itemsize)
    message, ancillary, flags, _ = connection.recvmsg(nbytes, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return message, fds.tolist(), flags


def send_fds(connection: socket.socket, fds: list[int], deadline: float) -> None:
    """Send at most ``MAX_FDS`` descriptors."""
    while True:
        try:
            socket.send_fds(connection, [FDS], fds)
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS or time.monotonic() >= deadline:
                raise
            # RLIMIT_NOFILE limits how many descriptors an ordinary user may have in flight.
            time.sleep(POLL_S)


def receive_fds(connection: socket.socket, count: int, gone: str) -> list[int]:
    """Return ``count`` descriptors; many of them come in several messages.

    Raises:
        OSError: EMFILE, when this process may not open so many files.
        PeerLostError: rank 0 ended; ``gone`` is the message.
    """
    fds: list[int] = []
    try:
        while len(fds) < count:
            _, part, flags = receive(connection, 16, MAX_FDS)
            fds += part
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, "no descriptor is left")
            if not part:
                raise PeerLostError(gone, rank=0)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def too_many_files(size: int) -> str:
    """Return the error text for a rank of a job of ``size`` ranks that has no descriptor left."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"a rank may not open more than {limit} files at once, and init() of {size} ranks needs up to {3 * size + 32} "
        f"besides its own; raise the limit before the job starts: ulimit -n {max(4096, 2 * limit)}"
    )


@contextlib.contextmanager
def explained(size: int) -> Iterator[None]:
    """Turn a refusal by the system into an error that names the limit.

    Raises:
        InitError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        if error.errno in OUT_OF_FILES:
            raise InitError(too_many_files(size)) from None
        raise InitError(f"the ranks of this host cannot meet: {error}") from error


def check_files(size: int) -> None:
    """See that there are descriptors for a host of ``size`` ranks; libzmq aborts when it has none.

    Raises:
        InitError: there are not enough.
    """
    with explained(size), contextlib.ExitStack() as files:
        for _ in range(3 * size + 32):
            files.callback(os.close, os.eventfd(0))
