"""Byte streams between a driver and its tasks, through sockets that require the job's key.

An agent exchanges frames over file descriptors. Each end has a thread that forwards the bytes of a socket pair to
the other end, encrypted; an empty message ends a stream. The first message of a task is its ``Registration``.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import socket as sockets
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from horovod.launch.frames import CHUNK_BYTES, AgentWire
from horovod.rendezvous import curve
from horovod.rendezvous.client import connect_first
from horovod.rendezvous.keys import purpose_key
from horovod.rendezvous.service import listen
from horovod.rendezvous.waiting import Patience

__all__ = ["Registration", "TaskConnection", "TaskEnd", "TaskListener"]

_PURPOSE = "tasks"
#: Maximum number of queued messages to one end; milliseconds until a retry when the queue is full.
_MESSAGES, _AGAIN_MS = 64, 5
_WELCOME = b"welcome"


class Registration(msgspec.Struct, frozen=True):
    """Description that a task sends to register."""

    version: str  # of this package
    partition: int  # number of the task; the same for all its attempts
    machine: str  # identifier of the machine or container, independent of its host name
    nodename: str  # the host's own name
    python: str  # path of its Python interpreter
    cores: int  # number of cores that it may use
    threads: str  # OMP_NUM_THREADS, which Spark sets from the cores of a task; empty if it is not set


class _Stream:
    """One socket pair: the local end, and the queued bytes in both directions."""

    def __init__(self, own: sockets.socket) -> None:
        own.setblocking(False)
        self.own = own
        self.incoming: collections.deque[bytes] = collections.deque()  # from the other end
        self.held: bytes | None = None  # for the other end; b"" ends the stream
        self.is_ending = False


class _Relay:
    """Forwards bytes in its own thread.

    Args:
        context: context of the socket; it ends with the thread.
        socket: a ROUTER, or a DEALER with one stream, whose peer is ``b""``.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        self._context, self._socket = context, socket
        self._streams: dict[bytes, _Stream] = {}
        self._by_fd: dict[object, bytes] = {}
        self._poller = zmq.Poller()
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="horovod-relay", daemon=True)

    def _open(self, peer: bytes) -> sockets.socket:
        """Open a stream; return its end for this process."""
        own, theirs = sockets.socketpair()
        self._streams[peer] = _Stream(own)
        self._by_fd[own.fileno()] = peer
        return theirs

    def close(self) -> None:
        """End all streams. Blocks until the thread has ended."""
        if not self._is_closed:
            self._is_closed = True
            os.eventfd_write(self._woken, 1)
            if self._thread.ident is not None:
                self._thread.join()
            for stream in self._streams.values():
                stream.own.close()
            self._context.destroy()
            os.close(self._woken)

    def _run(self) -> None:
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)
        while not self._is_closed:
            is_held = False
            for peer, stream in tuple(self._streams.items()):
                if stream.held is not None:
                    self._send(peer, stream, stream.held)
                    is_held |= stream.held is not None
            for stream in self._streams.values():
                wanted = (zmq.POLLIN if stream.held is None else 0) | (zmq.POLLOUT if stream.incoming else 0)
                self._poller.register(stream.own.fileno(), wanted)
            for ready, _ in self._poller.poll(_AGAIN_MS if is_held else None):
                if ready is self._socket:
                    self._receive()
                elif ready in self._by_fd:
                    peer = self._by_fd[ready]
                    self._flush(peer, self._streams[peer])
                    if peer in self._streams and self._streams[peer].held is None:
                        self._pass_on(peer, self._streams[peer])

    def _receive(self) -> None:
        for _ in range(_MESSAGES):
            try:
                *address, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            peer = b"".join(address)
            stream = self._streams.get(peer)
            if stream is None:
                self._meet(peer, data)
            elif data:
                stream.incoming.append(data)
                self._flush(peer, stream)
            else:
                stream.is_ending = True
                self._flush(peer, stream)

    def _meet(self, peer: bytes, data: bytes) -> None:
        """Handle the first message of a peer."""

    def _flush(self, peer: bytes, stream: _Stream) -> None:
        try:
            while stream.incoming:
                data = stream.incoming[0]
                sent = stream.own.send(data)
                stream.incoming.popleft()
                if sent < len(data):
                    stream.incoming.appendleft(data[sent:])
        except BlockingIOError:
            return
        except OSError:
            stream.is_ending = True
        if stream.is_ending:
            self._drop(peer)

    def _pass_on(self, peer: bytes, stream: _Stream) -> None:
        try:
            data = stream.own.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._send(peer, stream, data)

    def _send(self, peer: bytes, stream: _Stream, data: bytes) -> None:
        stream.held = None
        try:
            self._socket.send_multipart([*([peer] if peer else []), data], zmq.NOBLOCK)
        except zmq.Again:
            stream.held = data
            return
        except zmq.ZMQError:  # the other end is gone; bytes that it has sent are still forwarded
            data = b""
        if not data:
            stream.is_ending = True
            self._flush(peer, stream)

    def _drop(self, peer: bytes) -> None:
        stream = self._streams.pop(peer)
        del self._by_fd[stream.own.fileno()]
        with contextlib.suppress(KeyError):
            self._poller.unregister(stream.own.fileno())
        stream.own.close()


class TaskConnection:
    """A stream to the agent in a task, with the interface that ``RemoteJob`` needs.

    Args:
        task: registration of the task at the other end.
        own: the stream's end in this process.
    """

    #: Hint for the reason of its end: only Spark's log has it.
    stderr = "the log of its executor may say why"

    def __init__(self, task: Registration, own: sockets.socket) -> None:
        self.registration, self._own = task, own
        self.wire = AgentWire(own.fileno(), os.dup(own.fileno()), is_launcher=True)  # polled separately

    def is_lost(self) -> bool:
        """Check whether the task is lost, before a ``RemoteJob`` uses it."""
        self.wire.show_life()
        for _ in self.wire.receive():
            pass
        return self.wire.is_closed

    def hang_up(self) -> None:
        """Make the agent end its processes, and then itself."""
        if not self.wire.is_closed:
            self.wire.is_closed = True
            with contextlib.suppress(OSError):
                self._own.shutdown(sockets.SHUT_WR)

    kill = hang_up

    def close(self) -> None:
        """End the stream; the task ends by itself."""
        if self._own.fileno() >= 0:
            self.hang_up()
            os.close(self.wire.outgoing)
            self._own.close()


class TaskListener(_Relay):
    """Listener of the driver, at which tasks register.

    Args:
        secret: the job's secret.
        addresses: addresses of this host to listen at.
        objection: returns the reason why a task cannot be used, or empty. Called in another thread.

    Raises:
        OSError: none of the addresses can be used.
    """

    def __init__(self, secret: bytes, addresses: Sequence[str], objection: Callable[[Registration], str]) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        super().__init__(context, curve.server_socket(context, purpose_key(secret, _PURPOSE)))
        self._objection = objection
        self._arrived: queue.SimpleQueue[TaskConnection] = queue.SimpleQueue()
        try:
            self._socket.sndhwm = _MESSAGES
            self._socket.router_mandatory = True  # report when a peer is gone
            self.endpoints = listen(self._socket, addresses)
        except BaseException:
            self.close()
            raise
        self._thread.start()

    def arrivals(self, timeout_s: float = 0.0) -> list[TaskConnection]:
        """Return the tasks that have registered since the last call; their owner closes them.

        Args:
            timeout_s: seconds to wait for the first task.
        """
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._arrived.get(timeout=timeout_s) if timeout_s else self._arrived.get_nowait())
            while True:
                found.append(self._arrived.get_nowait())
        return found

    def close(self) -> None:
        super().close()
        for connection in self.arrivals():
            connection.close()

    def _meet(self, peer: bytes, data: bytes) -> None:
        try:
            task = msgspec.msgpack.decode(data, type=Registration)
        except msgspec.MsgspecError:
            return  # the stream has already ended here
        objection = self._objection(task)
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([peer, objection.encode() or _WELCOME])
            if not objection:
                self._arrived.put(TaskConnection(task, self._open(peer)))


class TaskEnd(_Relay):
    """A task's end of its stream.

    Args:
        secret: the job's secret.
        endpoints: addresses at which the driver listens.
        task: registration of this task.
        timeout_s: seconds to wait for the driver.

    Raises:
        InitError: the driver does not answer.
        RuntimeError: the driver refuses this task.
    """

    def __init__(self, secret: bytes, endpoints: Sequence[str], task: Registration, timeout_s: float) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        patience = Patience(timeout_s, lambda: None)
        nobody = f"the Spark driver does not answer at {', '.join(endpoints)}: can this host reach it?"
        try:
            key = purpose_key(secret, _PURPOSE)
            socket, _ = connect_first(context, key, lambda: endpoints, patience, nobody)
            socket.send(msgspec.msgpack.encode(task))
            if not socket.poll(max(0, int((patience.deadline - time.monotonic()) * 1000))):
                raise RuntimeError(nobody)
            if (answer := socket.recv()) != _WELCOME:
                raise RuntimeError(answer.decode())
        except BaseException:
            context.destroy()
            raise
        super().__init__(context, socket)
        self.own = self._open(b"")
        self._thread.start()

    def close(self) -> None:
        super().close()
        self.own.close()
