"""Ranks and strangers on their way to a meeting, as threads and processes, for the tests of the rendezvous."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import msgspec

from horovod import _version
from horovod.errors import HorovodInternalError
from horovod.rendezvous.host_meeting import meet
from horovod.rendezvous.keys import address_of, current_slot
from horovod.rendezvous.messages import HostMeeting
from horovod.world import World

__all__ = [
    "KEY",
    "LONG_S",
    "SHORT_S",
    "Attempt",
    "Elsewhere",
    "answer",
    "dial",
    "greeting",
    "listening",
    "name_of",
    "send",
    "world_of",
]

KEY = b"k" * 16
LONG_S, SHORT_S = 120.0, 0.3


def world_of(job: str, rank: int = 0, size: int = 2, key: bytes = KEY) -> World:
    return World(rank, size, rank, size, 0, 1, f"host{rank}", "horovodrun", job, key)


def name_of(job: str) -> str:
    """Where rank 0 listens now."""
    return address_of(world_of(job), current_slot())


class Attempt(threading.Thread):
    """One rank, as a thread, on its way to the meeting."""

    def __init__(self, job: str, rank: int, size: int, *, key: bytes = KEY, timeout_s: float = LONG_S) -> None:
        super().__init__()
        self.world = world_of(job, rank, size, key)
        self.meeting: HostMeeting | None = None
        self.error: HorovodInternalError | None = None
        self.arena = os.memfd_create(f"arena{rank}")
        self.control = os.memfd_create("control") if rank == 0 else -1
        self._how = (self.arena, 4096 + rank, self.control, timeout_s, rank)
        self.start()

    def run(self) -> None:
        try:
            self.meeting = meet(self.world, *self._how)
        except HorovodInternalError as error:
            self.error = error

    def done(self) -> HorovodInternalError | None:
        """Wait for the end and close what is ours, as ``init()`` does."""
        self.join(LONG_S + 10)
        assert not self.is_alive()
        if self.meeting is not None:
            fds = {self.meeting.control_fd, *self.meeting.arena_fds, *self.meeting.pid_fds}
            fds -= {self.arena, self.control}
            for fd in fds:
                assert not os.get_inheritable(fd)
                os.close(fd)
        os.close(self.arena)
        if self.control >= 0:
            os.close(self.control)
        return self.error


def dial(job: str) -> socket.socket:
    """Connect to rank 0 as soon as it listens."""
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(LONG_S)
        try:
            connection.connect(name_of(job))
            return connection
        except (ConnectionRefusedError, BlockingIOError):
            connection.close()


def greeting(rank: int = 1, size: int = 2, key: bytes = KEY, version: str = _version.__version__) -> bytes:
    body = msgspec.msgpack.encode([rank, size, "elsewhere", os.getpid(), version, 4096, rank])
    nonce = secrets.token_bytes(16)
    return hmac.digest(key, b"rank" + nonce + body, "sha256") + nonce + body


def send(connection: socket.socket, message: bytes, fds: int = 1) -> None:
    lent = [os.memfd_create("arena") for _ in range(fds)]
    try:
        socket.send_fds(connection, [message], lent)
    finally:
        for fd in lent:
            os.close(fd)


def answer(connection: socket.socket) -> Any:
    assert len(connection.recv(1 << 16)) == 32
    return msgspec.msgpack.decode(connection.recv(1 << 16)[32:])


@contextmanager
def listening(job: str) -> Iterator[socket.socket]:
    """Somebody has the name in place of rank 0."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as listener:
        listener.settimeout(LONG_S)
        listener.bind(name_of(job))
        listener.listen()
        yield listener


class Elsewhere:
    """Rank ``rank`` as a process of its own, which has greeted rank 0 and waits."""

    def __init__(self, job: str, rank: int, size: int) -> None:
        come = (
            "import os, sys\n"
            "from horovod.rendezvous.host_meeting import meet\n"
            "from horovod.rendezvous import host_meeting as guest\n"
            "from horovod.world import World\n"
            "rank, size = map(int, sys.argv[2:])\n"
            "take_part = guest._take_part\n"
            "guest._take_part = lambda *a: print('here', flush=True) or take_part(*a)\n"
            "world = World(rank, size, rank, size, 0, 1, 'there', 'horovodrun', sys.argv[1], b'k' * 16)\n"
            "meet(world, os.memfd_create('arena'), 4096, -1, 120.0, rank)\n"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", come, job, str(rank), str(size)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self.process.stdout.readline() == b"here\n"

    def kill(self) -> int:
        self.process.kill()
        self.process.communicate()
        return self.process.pid
