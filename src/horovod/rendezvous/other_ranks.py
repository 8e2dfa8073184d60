"""A meeting on every rank but 0: finds rank 0, verifies that it is rank 0, and takes its result."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import time
from collections.abc import Iterator

import msgspec

from horovod.errors import InitError, PeerLostError
from horovod.rendezvous import messages
from horovod.rendezvous.endings import Endings
from horovod.rendezvous.limits import OUT_OF_FILES, too_many_files
from horovod.rendezvous.messages import Greeting, HostMeeting, MeetingResult, Verdict, peer_of, sealed, sign
from horovod.rendezvous.names import address_of, current_slot
from horovod.rendezvous.waiting import Reminder
from horovod.world import World

__all__ = ["attend"]

#: Time for rank 0 to prove that it is rank 0; a process that was stopped is tried again.
_WELCOME_S = 5.0
#: Interval at which to check whether a missing rank has ended.
_LOOK_S = 0.25
#: Additional time for the explanation of rank 0, which keeps the deadline itself.
_GRACE_S = 2.0


def attend(
    world: World, hello: Greeting, arena_fd: int, endings: Endings, deadline: float, timeout_s: float
) -> HostMeeting:
    """Find rank 0 and meet the others there.

    Args:
        world: this process's place in the job.
        hello: its greeting.
        arena_fd: descriptor of its arena.
        endings: knows which ranks have ended.
        deadline: end of the search for rank 0, on the monotonic clock.
        timeout_s: limit of the search as a duration, for errors.

    Raises:
        InitError: rank 0 did not come in time, or there is no meeting for the reason that it gives.
        PeerLostError: a rank has ended.

    Blocks until all ranks are here, or until the deadline.
    """
    in_the_way, look, reminder = "", 0.0, Reminder(timeout_s)
    others = [rank for rank in range(world.size) if rank != world.rank]
    while True:
        world.meeting.check()
        if time.monotonic() >= look:
            look = time.monotonic() + _LOOK_S
            if ended := endings.ended(others):
                raise PeerLostError(ended[1], rank=ended[0])
            reminder.look(lambda: "rank 0 to call init()")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
            with contextlib.suppress(ConnectionRefusedError, BlockingIOError, TimeoutError):
                connection.settimeout(max(0.1, min(_WELCOME_S, deadline + _GRACE_S - time.monotonic())))
                # An abstract name cannot be waited for: when refused, try again, as rank 0 may still be importing.
                connection.connect(address_of(world, current_slot()))
                nonce = messages.nonce()
                in_the_way = _introduce(connection, world, hello, arena_fd, nonce)
                if not in_the_way:
                    return _take_part(connection, world, nonce, max(time.monotonic(), deadline) + _GRACE_S, timeout_s)
        if time.monotonic() >= deadline:
            raise InitError(
                f"rank {world.rank} waited {timeout_s:g} s for rank 0 of job {world.job!r} on {world.hostname} "
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
        if error.errno in OUT_OF_FILES:
            raise
        message = b""
    if hmac.compare_digest(message, sign(world.key, b"welcome", nonce)):
        return ""
    if not message:  # rank 0 has just left or changed its name; or a stranger
        return "It hung up, or another process did that listened in its place"
    return "A process that listened in its place does not know the job's key"


def _take_part(connection: socket.socket, world: World, nonce: bytes, deadline: float, timeout_s: float) -> HostMeeting:
    gone, check = f"rank 0 (pid {peer_of(connection)[0]}) ended inside init()", world.meeting.check
    connection.settimeout(max(0.1, deadline - time.monotonic()))
    fds: list[int] = []
    try:
        with _named(gone, timeout_s):
            message = messages.await_message(connection, messages.MAX_ANSWER, deadline, check)
        if not message:
            raise PeerLostError(gone, rank=0)
        digest, body = message[:32], message[32:]
        if not hmac.compare_digest(digest, sign(world.key, b"host", nonce, body)):
            raise InitError("the answer of rank 0 is not signed with the job's key")
        answer = msgspec.msgpack.decode(body, type=MeetingResult)
        answer.verdict.enforce()
        own = Verdict()
        with _named(gone, timeout_s):
            try:
                fds = messages.receive_fds(connection, 2 * world.size + 1, gone)
            except OSError as error:
                if error.errno not in OUT_OF_FILES:
                    raise
                own = Verdict(f"rank {world.rank}: {too_many_files(world.size)}")
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
