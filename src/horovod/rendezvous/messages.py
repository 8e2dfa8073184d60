"""What the ranks of a host say to each other when they meet, and how descriptors travel with it.

Every message is signed with the job's key; a greeting brings a nonce, which the answer's signature covers.
Source: unix(7), SO_PEERCRED and SCM_RIGHTS.
"""

from __future__ import annotations

import array
import errno
import hmac
import os
import socket
import struct
import time

import msgspec

from horovod.errors import InitError, PeerLostError

__all__ = [
    "DIGEST",
    "MAX_FDS",
    "MAX_MESSAGE",
    "NONCE",
    "POLL_S",
    "Answer",
    "Hello",
    "peer_of",
    "receive",
    "receive_fds",
    "send_fds",
    "sign",
]

#: Bytes of a nonce, of a signature, and of a greeting at most.
NONCE, DIGEST, MAX_MESSAGE = 16, 32, 64 << 10
#: Descriptors in one message.
MAX_FDS = 200
#: How often to try again what cannot be waited for.
POLL_S = 0.002
_CREDENTIALS = struct.Struct("3i")


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """A rank's greeting.

    Attributes:
        rank, size: who it is, and of how many.
        host, pid: where it runs.
        version: of this package.
        arena_bytes: size of its arena.
    """

    rank: int
    size: int
    host: str
    pid: int
    version: str
    arena_bytes: int


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """What rank 0 tells all of them.

    Attributes:
        hellos: all greetings, by rank.
        error: when not empty, why there is no job.
        lost: the rank that died, if that is why, else -1.
    """

    hellos: list[Hello]
    error: str = ""
    lost: int = -1


def sign(key: bytes, role: bytes, nonce: bytes, body: bytes) -> bytes:
    """Return the signature of a message that one in the ``role`` of a rank or of the host sends."""
    return hmac.digest(key, role + nonce + body, "sha256")


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end, as the kernel knows them."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


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
    """Send ``MAX_FDS`` descriptors at most."""
    while True:
        try:
            socket.send_fds(connection, [b"fds"], fds)
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS or time.monotonic() >= deadline:
                raise
            # Only so many descriptors of an ordinary user may be under way at once: RLIMIT_NOFILE.
            time.sleep(POLL_S)


def receive_fds(connection: socket.socket, count: int, gone: str) -> list[int]:
    """Return ``count`` descriptors, which come in several messages if they are many.

    Raises:
        InitError: this process may not open so many files.
        PeerLostError: rank 0 ended, in the words of ``gone``.
    """
    fds: list[int] = []
    try:
        while len(fds) < count:
            _, part, flags = receive(connection, 16, MAX_FDS)
            fds += part
            if flags & socket.MSG_CTRUNC:
                raise InitError(f"this process may not open the {count} files that its job needs; raise ulimit -n")
            if not part:
                raise PeerLostError(gone, rank=0)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds
