"""Lets the ranks of one host find each other: one meeting on an abstract unix socket, which is closed afterwards.

Rank 0 listens during init() under a name that only processes with the job's key can compute, and that changes every
second. The name is not a file, so nothing is left behind in any case. Each rank first sends a greeting, signed with the
key, and its arena as a file descriptor. Rank 0 answers all of them at once, signed too, with the descriptors of all
ranks; the meeting is valid when all have confirmed that they received them. A peer of another user, or without the
key, gets no answer, and cannot prevent a meeting by binding names or holding connections open.

No replay protection is needed: no other process can read from a unix socket, and the kernel identifies the peer.
Source: unix(7), SO_PEERCRED and SCM_RIGHTS; pidfd_open(2).
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import time
from collections.abc import Iterator

import msgspec

from horovod import _version
from horovod.errors import InitError, PeerLostError
from horovod.rendezvous import messages
from horovod.rendezvous.endings import Endings
from horovod.rendezvous.keys import address_of, current_slot
from horovod.rendezvous.messages import Greeting, HostMeeting, MeetingResult, Verdict, peer_of, sealed, sign
from horovod.rendezvous.rank_zero import RankZero
from horovod.rendezvous.waiting import Patience
from horovod.world import World

__all__ = ["meet"]

#: Time for rank 0 to prove that it is rank 0; a process that was stopped is tried again.
_WELCOME_S = 5.0
#: Interval at which to check whether a missing rank has ended.
_LOOK_S = 0.25
#: Additional time for the explanation of rank 0, which keeps the deadline itself.
_GRACE_S = 2.0


def meet(
    world: World, arena_fd: int, arena_bytes: int, control_fd: int, timeout_s: float, rank_in_job: int
) -> HostMeeting:
    """Meet the other ranks of this host. ``control_fd`` is the control page on rank 0, else -1; ``rank_in_job`` is this
    process's rank in the job, if ``world`` is its place among the ranks of this host.

    Raises:
        InitError: a rank did not come in time, or does not match the others; or this process has no descriptor left.
        PeerLostError: a rank has ended, before the meeting or in it.
        HorovodInternalError: ``world.meeting.check`` has cancelled the meeting.

    Blocks until all ranks are here, or ``timeout_s``.
    """
    version = _version.__version__
    hello = Greeting(world.rank, world.size, world.hostname, os.getpid(), version, arena_bytes, rank_in_job)
    patience = Patience(timeout_s, world.meeting.check)
    # Each rank finds out by itself: rank 0 could not accept the connections of those to tell.
    messages.check_files(world.size)
    with messages.explained(world.size), contextlib.closing(Endings(world)) as endings:
        if world.rank == 0:
            with contextlib.closing(RankZero(world, hello, arena_fd, control_fd, endings)) as host:
                meeting = host.gather(patience)
        else:
            meeting = _attend(world, hello, arena_fd, endings, patience)
        endings.met(meeting.pids)
    return meeting


def _attend(world: World, hello: Greeting, arena_fd: int, endings: Endings, patience: Patience) -> HostMeeting:
    """Find rank 0 and meet the others there."""
    in_the_way, look = "", 0.0
    others = [rank for rank in range(world.size) if rank != world.rank]
    while True:
        patience.check()
        if time.monotonic() >= look:
            look = time.monotonic() + _LOOK_S
            if ended := endings.ended(others):
                raise PeerLostError(ended[1], rank=ended[0])
            patience.remind("rank 0 to call init()")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
            with contextlib.suppress(ConnectionRefusedError, BlockingIOError, TimeoutError):
                connection.settimeout(max(0.1, min(_WELCOME_S, patience.left_s + _GRACE_S)))
                # An abstract name cannot be waited for: when refused, try again, as rank 0 may still be importing.
                connection.connect(address_of(world, current_slot()))
                nonce = messages.nonce()
                in_the_way = _introduce(connection, world, hello, arena_fd, nonce)
                if not in_the_way:
                    return _take_part(connection, world, nonce, patience)
        if patience.left_s <= 0:
            raise InitError(
                f"rank {world.rank} waited {patience.total_s:g} s for rank 0 of job {world.job!r} on {world.hostname} "
                "to call init() (HOROVOD_START_TIMEOUT or --start-timeout sets this); look at its output"
                + (f". {in_the_way}" if in_the_way else "")
            )
        time.sleep(messages.POLL_S)


def _introduce(connection: socket.socket, world: World, hello: Greeting, arena_fd: int, nonce: bytes) -> str:
    """Greet the listening process; return why it is not rank 0, or an empty text when it has the key."""
    if peer_of(connection)[1] != os.getuid():
        return "A process of another user listened in its place"
    try:
        body = msgspec.msgpack.encode(hello)
        socket.send_fds(connection, [sealed(world.key, b"rank", nonce, body)], [arena_fd])
        message = connection.recv(64)
    except TimeoutError:
        return "A process that listened in its place did not answer: is rank 0 stopped?"
    except OSError as error:
        if error.errno in messages.OUT_OF_FILES:
            raise
        message = b""
    if hmac.compare_digest(message, sign(world.key, b"welcome", nonce)):
        return ""
    if not message:  # rank 0 has just left or changed its name; or a stranger
        return "It hung up, or another process did that listened in its place"
    return "A process that listened in its place does not know the job's key"


def _take_part(connection: socket.socket, world: World, nonce: bytes, patience: Patience) -> HostMeeting:
    gone = f"rank 0 (pid {peer_of(connection)[0]}) ended inside init()"
    deadline, check = max(time.monotonic(), patience.deadline) + _GRACE_S, patience.check
    connection.settimeout(max(0.1, deadline - time.monotonic()))
    fds: list[int] = []
    try:
        with _named(gone, patience.total_s):
            message = messages.await_message(connection, messages.MAX_ANSWER, deadline, check)
        if not message:
            raise PeerLostError(gone, rank=0)
        digest, body = message[:32], message[32:]
        if not hmac.compare_digest(digest, sign(world.key, b"host", nonce, body)):
            raise InitError("the answer of rank 0 is not signed with the job's key")
        answer = msgspec.msgpack.decode(body, type=MeetingResult)
        answer.verdict.enforce()
        own = Verdict()
        with _named(gone, patience.total_s):
            try:
                fds = messages.receive_fds(connection, 2 * world.size + 1, gone)
            except OSError as error:
                if error.errno not in messages.OUT_OF_FILES:
                    raise
                own = Verdict(f"rank {world.rank}: {messages.too_many_files(world.size)}")
            connection.send(msgspec.msgpack.encode(own))
            # Skip descriptors that were not received.
            while (
                message := messages.await_message(connection, messages.MAX_GREETING, deadline, check)
            ) == messages.FDS:
                pass
        if not message:
            raise PeerLostError(gone, rank=0)
        msgspec.msgpack.decode(message, type=Verdict).enforce()
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return HostMeeting.of(answer.hellos, fds[0], fds[1 : world.size + 1], fds[world.size + 1 :])


@contextlib.contextmanager
def _named(gone: str, timeout_s: float) -> Iterator[None]:
    """Explain a broken connection to rank 0."""
    try:
        yield
    except TimeoutError:
        raise InitError(f"rank 0 did not answer within {timeout_s:g} s; is it stopped?") from None
    except OSError:
        raise PeerLostError(gone, rank=0) from None
