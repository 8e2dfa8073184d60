"""The connection between the leader of a host and that of rank 0's host: frames, in order, none twice.

Any thread may send and receive: the thread that holds the lock does both, for all. The socket's descriptor signals
an event only once; so every thread that has used the socket checks whether a message has come.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

import zmq

from horovod.links.hosts import frames
from horovod.links.hosts.frames import Message
from horovod.logs import logger

__all__ = ["Wire", "descriptor_of", "has_more"]

#: Bytes that may wait for a host that takes nothing, before it counts as lost.
_MOST_WAITING = 256 << 20
_PART_S, _LOOK_MS, _LINGER_MS = 2.0, 50, 1000
#: How long to wait for a host before asking whether it has ended: most hosts answer sooner.
_PATIENCE_S = 0.25
_wires: weakref.WeakSet[Wire] = weakref.WeakSet()


class Wire:
    """See the module. At the hub ``socket`` is a ROUTER, elsewhere a DEALER; it is owned from now on. ``ids`` are the
    leaders' routing ids by host; only the hub uses them. ``take`` is called with a host and each message from it, by
    the thread that holds the lock; the last message says that the host leaves. ``lose`` is called in the same way, with
    a host that cannot be reached any more, and the reason.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        ids: Sequence[bytes],
        index: int,
        take: Callable[[int, Message], None],
        lose: Callable[[int, str], None],
    ) -> None:
        self._socket = socket
        self._is_hub = index == 0
        self._ids = list(ids)
        self._hosts = {routing_id: host for host, routing_id in enumerate(ids)}
        self._take, self._lose = take, lose
        self._lock = threading.Lock()
        self._is_dirty = False
        self.peers = [host for host in range(len(ids)) if host != index] if self._is_hub else [0]
        self._outgoing: dict[int, collections.deque[bytes]] = {host: collections.deque() for host in self.peers}
        self._sent, self._heard = dict.fromkeys(self.peers, 0), dict.fromkeys(self.peers, 0)
        self.lost: set[int] = set()  # hosts to which nothing is sent, and that are not heard any more
        # Hosts that have said goodbye; those of them that close the connection.
        self._parted: set[int] = set()
        self._leaving: set[int] = set()
        self.greeted: set[int] = set()  # hosts that were sent their last message
        self._fds: set[int] = set()
        _wires.add(self)
        self._has_complained = False
        self._is_closed = False
        if self._is_hub:
            socket.router_mandatory = True
        self.fd = descriptor_of(socket)

    def post(self, hosts: Iterable[int], messages: Sequence[Message]) -> None:
        """Send messages to hosts; never blocks."""
        for start in range(0, len(messages), frames.MAX_ITEMS):
            body = frames.encode(messages[start : start + frames.MAX_ITEMS])
            for host in hosts:
                if host not in self.greeted:
                    self._outgoing[host].append(body)
        self._is_dirty = True
        self.pump()

    def pump(self) -> None:
        """Send waiting messages, and take received ones, unless another thread does it anyway."""
        while True:
            if not self._lock.acquire(False):
                return  # the thread that holds it sees all earlier posts
            try:
                if self._is_closed:
                    return
                self._is_dirty = False
                unreachable = self._send()
                self._receive()
                for host, why in unreachable.items():
                    if host in self._leaving:
                        self.lost.add(host)
                    else:
                        self._lose(host, why)
            finally:
                self._lock.release()
            if not self._is_dirty:
                return

    def hang_up(self, host: int) -> None:
        """Give up a host whose connection has ended, after taking all its earlier messages."""
        with self._lock:
            if not self._is_closed:
                self._receive()
                self._lose(host, "")

    def close(self, has_ended: Callable[[int], bool] = lambda host: False) -> None:
        """Send the last message to all, and close the socket when they have sent theirs, or after two seconds.

        Data sent just before a socket is closed may not arrive. So the hub stays until the leaving hosts have
        received its last message: until they are gone. Hosts that go on have received it when they answer.
        """
        self._part(self.peers, leaves=True)
        poll, deadline = select.poll(), time.monotonic() + _PART_S
        poll.register(self.fd, select.POLLIN)
        while self._is_awaited() and time.monotonic() < deadline:
            if self._is_hub:
                self._say(set(self.peers) - self.lost, frames.Bye())  # this shows which hosts are gone
            poll.poll(_LOOK_MS)
            self.pump()
            if time.monotonic() > deadline - _PART_S + _PATIENCE_S:
                for host in set(self.peers) - self.lost - self._parted:
                    if has_ended(host):
                        self.lost.add(host)
        with self._lock:
            self._is_closed = True
            _wires.discard(self)
            self._socket.close(linger=_LINGER_MS)

    def _is_awaited(self) -> bool:
        """Whether a host may not have received all messages."""
        present = set(self.peers) - self.lost
        return not self._parted.issuperset(present) or (self._is_hub and not self._leaving.isdisjoint(present))

    def close_in_child(self) -> None:
        """Close the connections that a forked child has inherited: else they would outlive the parent."""
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _send(self) -> dict[int, str]:
        """Send as much as possible; return the hosts that cannot be reached, and why."""
        unreachable = {}
        for host, waiting in self._outgoing.items():
            if host in self.lost:
                waiting.clear()
            while waiting:
                frame = frames.numbered(self._sent[host], waiting[0])
                try:
                    if self._is_hub:
                        self._socket.send_multipart((self._ids[host], frame), zmq.NOBLOCK)
                    else:
                        self._socket.send(frame, zmq.NOBLOCK)
                except zmq.Again:
                    if sum(map(len, tuple(waiting))) > _MOST_WAITING:
                        unreachable[host] = "it does not read its messages"
                    break
                except zmq.ZMQError as error:
                    if error.errno != zmq.EHOSTUNREACH:
                        raise
                    unreachable[host] = ""
                    break
                self._sent[host] += 1
                waiting.popleft()
        return unreachable

    def _receive(self) -> None:
        socket = self._socket
        while has_more(socket):
            if len(self._fds) < len(self.peers):
                received = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                self._fds.add(int(received[-1].get(zmq.SRCFD)))
                parts = [frame.bytes for frame in received]
            else:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            host = self._hosts.get(parts.pop(0), -1) if self._is_hub else 0
            if host not in self.lost:
                self._hear(host, parts)

    def _hear(self, host: int, parts: Sequence[bytes]) -> None:
        number = frames.number_of(parts[0]) if len(parts) == 1 else -1
        if host not in self._heard or number < self._heard[host]:
            self._complain(f"data from host {host} is not a frame, or repeats one")
            return
        if number > self._heard[host]:
            self._lose(host, f"frame {self._heard[host]} is missing; received frame {number}")
            return
        self._heard[host] += 1
        try:
            messages = frames.decode(parts[0])
        except ValueError as error:
            # The sender has the key, so a message of the job would be missing.
            self._lose(host, f"frame {number} cannot be decoded: {error}")
            return
        for message in messages:
            if isinstance(message, frames.Bye):
                self._hear_last(host, message)
            else:
                self._take(host, message)

    def _hear_last(self, host: int, message: frames.Bye) -> None:
        self._parted.add(host)
        self._part((host,), leaves=False)
        if message.leaves and host not in self._leaving:
            self._leaving.add(host)
            self._take(host, message)

    def _part(self, hosts: Iterable[int], leaves: bool) -> None:
        """Send the last message to hosts, unless it was sent already."""
        fresh = [host for host in hosts if host not in self.greeted]
        self.greeted.update(fresh)
        self._say(fresh, frames.Bye(leaves))

    def _say(self, hosts: Iterable[int], message: frames.Bye) -> None:
        body = frames.encode([message])
        for host in hosts:
            self._outgoing[host].append(body)
        self._is_dirty = True
        self.pump()

    def _complain(self, text: str) -> None:
        """Log, only the first time, that data is ignored."""
        if not self._has_complained:
            self._has_complained = True
            logger.warning(f"between hosts: {text}; it is ignored. Further ones are not logged")


def descriptor_of(socket: zmq.Socket[bytes]) -> int:
    """Return the descriptor that becomes readable, once, when a socket has an event."""
    fd = socket.getsockopt(zmq.FD)
    assert isinstance(fd, int)
    return fd


def has_more(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message can be received."""
    events = socket.get(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & zmq.POLLIN)


def _after_fork() -> None:
    for wire in list(_wires):
        wire.close_in_child()


os.register_at_fork(after_in_child=_after_fork)
