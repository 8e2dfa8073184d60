"""Rank 0's side of a meeting: takes greetings, detects ranks that will not come, and answers all at once."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from horovod.phrases import list_ranks
from horovod.rendezvous import messages
from horovod.rendezvous.endings import Endings
from horovod.rendezvous.listener import Listener
from horovod.rendezvous.messages import Greeting, HostMeeting, MeetingResult, Verdict, peer_of, sign
from horovod.rendezvous.waiting import Patience
from horovod.syscalls import open_process
from horovod.world import World

__all__ = ["RankZero"]

#: After an error, time for ranks that come a moment later to receive it.
_LINGER_S = 1.0
#: Time for a rank that came in time to receive its descriptors.
_CONFIRM_S = 10.0
#: Interval at which to check whether a missing rank has ended.
_LOOK_S = 0.25


@dataclass
class _Guest:
    connection: socket.socket
    nonce: bytes
    hello: Greeting
    arena_fd: int
    pid_fd: int

    @property
    def death(self) -> Verdict:
        """The verdict if this rank has died."""
        return Verdict(f"rank {self.hello.rank} (pid {self.hello.pid}) died inside init()", self.hello.rank)


class RankZero:
    """One meeting. ``endings`` knows which ranks have ended."""

    def __init__(self, world: World, hello: Greeting, arena_fd: int, control_fd: int, endings: Endings) -> None:
        self._world = world
        self._hello = hello
        self._control_fd = control_fd
        self._endings = endings
        self._arena_fd = arena_fd
        self._pid_fd = open_process(os.getpid())
        self._guests: dict[int, _Guest] = {}
        # Processes that left init() alive, by pidfd: they may come back, or die.
        self._absent: dict[int, _Guest] = {}
        # Includes ranks that have died since.
        self._heard: set[int] = set()
        self._trouble = Verdict()
        self._deadline = 0.0
        self._is_over = False
        self._selector = selectors.DefaultSelector()
        self._door = Listener(world, self._selector, self._hear, self._fail)

    def gather(self, patience: Patience) -> HostMeeting:
        """Wait for all ranks, and give every rank all descriptors.

        Raises:
            InitError: a rank did not come in time, or does not match the others.
            PeerLostError: a rank has ended.

        Blocks until all ranks are here, or until the deadline.
        """
        self._deadline, look = patience.deadline, 0.0
        while self._is_waiting() and self._door.is_open and (now := time.monotonic()) < self._deadline:
            self._door.rotate()
            patience.check()
            if now >= look:
                look = now + _LOOK_S
                self._look()
                patience.remind(f"{list_ranks(self._missing())} to call init()")
            for key, _ in self._selector.select(max(0.0, min(messages.CHECK_S, self._deadline - now))):
                key.data(key.fileobj)
        self._door.close()
        if self._is_waiting():
            self._fail(
                f"{list_ranks(self._missing())} did not call init() within {patience.total_s:g} s, "
                "the others did (HOROVOD_START_TIMEOUT or --start-timeout sets this); look at their output"
            )
        return self._answer()

    def close(self) -> None:
        """Close all connections; after a failed meeting, close the ranks' descriptors, too."""
        self._door.close()
        self._selector.close()
        for guest in self._guests.values():
            guest.connection.close()
            if not self._is_over:
                os.close(guest.arena_fd)
                os.close(guest.pid_fd)
        for pid_fd in self._absent:
            os.close(pid_fd)
        if not self._is_over:
            os.close(self._pid_fd)

    def _is_waiting(self) -> bool:
        return len(self._heard) < self._world.size - 1

    def _fail(self, error: str, lost: int = -1) -> None:
        """Record that there will be no meeting; ranks that come a moment later must learn of it instead of waiting."""
        if not self._trouble.error:
            self._trouble = Verdict(error, lost)
            self._deadline = min(self._deadline, time.monotonic() + _LINGER_S)

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._world.size) if rank not in self._guests]

    def _look(self) -> None:
        if ended := self._endings.ended(self._missing()):
            self._heard.add(ended[0])
            self._fail(ended[1], ended[0])

    def _hear(self, connection: socket.socket) -> bool:
        """Handle a newcomer's message; return False when there is none yet."""
        try:
            message, fds, flags = messages.receive(connection, messages.MAX_GREETING, 4)
        except BlockingIOError:
            return False
        except OSError:
            message, fds, flags = b"", [], 0
        role, nonce, body = messages.read(self._world.key, message)
        is_cut = bool(flags & socket.MSG_CTRUNC)
        if role == b"rank" and len(fds) == 1 and not is_cut:
            self._welcome(connection, nonce, body, fds[0])
            return True
        if role == b"rank" and is_cut and not fds:
            self._fail(messages.too_many_files(self._world.size))
        if role == b"probe":
            with contextlib.suppress(OSError):
                connection.send(sign(self._world.key, b"welcome", nonce))
        for fd in fds:
            os.close(fd)
        connection.close()
        return True

    def _welcome(self, connection: socket.socket, nonce: bytes, body: bytes, arena_fd: int) -> None:
        pid, _ = peer_of(connection)
        rank, pid_fd = -1, -1
        try:
            hello = msgspec.msgpack.decode(body, type=Greeting)
            rank = hello.rank
            self._heard.add(rank)
            pid_fd = open_process(pid)
        except msgspec.DecodeError:
            self._fail(
                f"a process (pid {pid}) with this job's key runs another version of khorovod, rank 0 "
                f"{self._hello.version}; install one version everywhere"
            )
        except ProcessLookupError:
            self._fail(f"rank {rank} (pid {pid}) died inside init()", rank)
        except OSError as refusal:
            if refusal.errno not in messages.OUT_OF_FILES:
                raise
            self._fail(messages.too_many_files(self._world.size))
        if pid_fd < 0:
            os.close(arena_fd)
            connection.close()
            return
        for absent in [fd for fd, guest in self._absent.items() if guest.hello.rank == rank]:
            self._forget(absent)
        if rank in self._guests:
            self._leave(self._guests[rank].connection)  # if it has come a second time
        error = self._unfit(hello)
        guest = _Guest(connection, nonce, hello, arena_fd, pid_fd)
        self._guests[-len(self._guests) - 1 if error else rank] = guest
        self._heard.add(rank)
        self._selector.register(connection, selectors.EVENT_READ, self._leave)
        self._selector.register(pid_fd, selectors.EVENT_READ, self._die)
        with contextlib.suppress(OSError):
            connection.send(sign(self._world.key, b"welcome", nonce))
        if error:
            self._fail(error)

    def _unfit(self, hello: Greeting) -> str:
        if hello.version != self._hello.version:
            return (
                f"rank {hello.rank} runs khorovod {hello.version}, rank 0 {self._hello.version}; "
                "install one version everywhere"
            )
        if hello.size != self._hello.size:
            return f"rank {hello.rank} expects {hello.size} ranks, rank 0 expects {self._hello.size}"
        if not 0 < hello.rank < hello.size:
            return f"a process (pid {hello.pid}) came as rank {hello.rank} of {hello.size}"
        if hello.rank in self._guests:
            other = self._guests[hello.rank].hello.pid
            return f"two processes came as rank {hello.rank}: pid {other} and pid {hello.pid}"
        return ""

    def _leave(self, connection: socket.socket) -> None:
        """Handle a rank that has hung up: it is dying, or its init() was interrupted and may be called again."""
        number = next((number for number, guest in self._guests.items() if guest.connection is connection), None)
        if number is None:
            return
        try:
            connection.recv(1)  # a rank sends nothing now
        except BlockingIOError:
            return
        except OSError:
            pass
        guest = self._guests.pop(number)
        self._heard.discard(guest.hello.rank)
        self._selector.unregister(connection)
        connection.close()
        os.close(guest.arena_fd)
        self._absent[guest.pid_fd] = guest

    def _die(self, pid_fd: int) -> None:
        guest = self._absent.get(pid_fd) or next(g for g in self._guests.values() if g.pid_fd == pid_fd)
        self._heard.add(guest.hello.rank)
        if pid_fd in self._absent:
            self._forget(pid_fd)
        else:
            self._selector.unregister(pid_fd)
        self._fail(guest.death.error, guest.death.lost)

    def _forget(self, pid_fd: int) -> None:
        self._selector.unregister(pid_fd)
        del self._absent[pid_fd]
        os.close(pid_fd)

    def _answer(self) -> HostMeeting:
        verdict = self._trouble
        ranks = [] if verdict.error else [self._guests[rank] for rank in range(1, self._world.size)]
        hellos = [self._hello, *(guest.hello for guest in ranks)]
        arena_fds = [self._arena_fd, *(guest.arena_fd for guest in ranks)]
        pid_fds = [self._pid_fd, *(guest.pid_fd for guest in ranks)]
        deadline = max(self._deadline, time.monotonic() + (_LINGER_S if verdict.error else _CONFIRM_S))
        answer = MeetingResult([] if verdict.error else hellos, verdict)
        body = msgspec.msgpack.encode(answer)
        fds = [] if verdict.error else [self._control_fd, *arena_fds, *pid_fds]
        for guest in self._guests.values():
            # A rank that has just died does not confirm.
            with contextlib.suppress(OSError):
                guest.connection.settimeout(max(0.01, deadline - time.monotonic()))
                guest.connection.send(sign(self._world.key, b"host", guest.nonce, body) + body)
                for start in range(0, len(fds), messages.MAX_FDS):
                    messages.send_fds(guest.connection, fds[start : start + messages.MAX_FDS], deadline)
        for guest in ranks:
            said = _confirmation(guest, deadline, self._world.meeting.check)
            verdict = verdict if verdict.error else said
        for guest in ranks:
            with contextlib.suppress(OSError):
                guest.connection.send(msgspec.msgpack.encode(verdict))
        verdict.enforce()
        self._is_over = True
        return HostMeeting.of(hellos, self._control_fd, arena_fds, pid_fds)


def _confirmation(guest: _Guest, deadline: float, check: Callable[[], None]) -> Verdict:
    """Return whether a rank has received everything."""
    try:
        message = messages.await_message(guest.connection, messages.MAX_GREETING, deadline, check)
        return msgspec.msgpack.decode(message, type=Verdict) if message else guest.death
    except TimeoutError:
        return Verdict(f"rank {guest.hello.rank} (pid {guest.hello.pid}) stopped inside init(); look at its output")
    except OSError:
        return guest.death
