"""Messages between the ranks of a host when they meet, and the descriptors that travel with them.

    rank to rank 0   greeting, with its arena                 Verdict: it has everything
    rank 0 to rank                   welcome   MeetingResult, descriptors                 Verdict: all have

Greeting, welcome and result are signed with the job's key; a greeting brings a nonce, which the signatures of the
answers cover. A welcome comes at once, so that no rank waits long for a stranger that listens in silence.
Source: unix(7), SO_PEERCRED and SCM_RIGHTS.
"""

from __future__ import annotations

import array
import errno
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from horovod.errors import InitError, PeerLostError

__all__ = [
    "CHECK_S",
    "FDS",
    "MAX_ANSWER",
    "MAX_FDS",
    "MAX_GREETING",
    "POLL_S",
    "Greeting",
    "HostMeeting",
    "MeetingResult",
    "Verdict",
    "await_message",
    "nonce",
    "peer_of",
    "read",
    "receive",
    "receive_fds",
    "sealed",
    "send_fds",
    "sign",
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
_CREDENTIALS = struct.Struct("3i")


@dataclass
class HostMeeting:
    """Result of the meeting, the same for all ranks of a host.

    Attributes:
        control_fd: the control page.
        arena_fds: each rank's arena, by rank.
        arena_bytes: each arena's size, by rank.
        pid_fds: a pidfd of each rank, by rank.
        pids: process ids, by rank.
        hosts: host names, by rank.
    """

    control_fd: int
    arena_fds: list[int]
    arena_bytes: list[int]
    pid_fds: list[int]
    pids: list[int]
    hosts: list[str]

    @classmethod
    def of(cls, hellos: list[Greeting], control_fd: int, arena_fds: list[int], pid_fds: list[int]) -> HostMeeting:
        """Return the result that the greetings and the descriptors give."""
        sizes, pids, hosts = zip(*((hello.arena_bytes, hello.pid, hello.host) for hello in hellos), strict=True)
        return cls(control_fd, arena_fds, list(sizes), pid_fds, list(pids), list(hosts))


class Greeting(msgspec.Struct, array_like=True, frozen=True):
    """A rank's greeting.

    Attributes:
        rank, size: its rank, and the number of ranks.
        host, pid: its host and process id.
        version: version of this package.
        arena_bytes: size of its arena.
    """

    rank: int
    size: int
    host: str
    pid: int
    version: str
    arena_bytes: int


class MeetingResult(msgspec.Struct, array_like=True, frozen=True):
    """Rank 0's answer to all ranks.

    Attributes:
        hellos: all greetings, by rank.
        verdict: whether there is a job.
    """

    hellos: list[Greeting]
    verdict: Verdict


class Verdict(msgspec.Struct, array_like=True, frozen=True):
    """Whether the meeting succeeded: each rank reports whether it received everything, then rank 0 decides for all.

    Attributes:
        error: why there is no job; empty when there is one.
        lost: the rank whose death is the reason, else -1.
    """

    error: str = ""
    lost: int = -1

    def enforce(self) -> None:
        """Raise the error, if there is one.

        Raises:
            PeerLostError: a rank died.
            InitError: there is no job for another reason.
        """
        if self.lost >= 0:
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
    """Return the next message; empty when the other side has gone.

    Args:
        connection: connection to the other side.
        nbytes: size of the largest message, in bytes.
        deadline: end of the wait, on the monotonic clock.
        check: raises an error when waiting has become useless.

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
