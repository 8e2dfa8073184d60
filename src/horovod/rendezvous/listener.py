"""The sockets on which rank 0 listens: under the present and the next name, with few places for silent peers.

A process of another user is disconnected at once. Of the silent connections, only a limited number stay: the oldest is
closed first. A slow rank that loses its connection in this way tries again.
"""

from __future__ import annotations

import errno
import hmac
import os
import selectors
import socket
from collections.abc import Callable

from horovod.rendezvous import messages
from horovod.rendezvous.keys import address_of, current_slot
from horovod.rendezvous.messages import peer_of, sealed, sign
from horovod.world import World

__all__ = ["Listener"]

#: Limit of silent connections, in addition to the number of ranks.
_IDLE = 64


class Listener:
    """The listening sockets of a meeting. The value of a socket in ``selector`` is a function to call with it. ``hear``
    handles a connection, and returns False when it has no message yet; ``fail`` gets the reason why there can be no
    meeting.
    """

    def __init__(
        self,
        world: World,
        selector: selectors.BaseSelector,
        hear: Callable[[socket.socket], bool],
        fail: Callable[[str], None],
    ) -> None:
        self._world = world
        self._selector = selector
        self._hear = hear
        self._fail = fail
        self._listeners: dict[int, socket.socket] = {}
        # Connections to processes that hold our names, and the nonces sent there.
        self._taken: dict[int, tuple[socket.socket, bytes]] = {}
        self._idle: dict[socket.socket, None] = {}
        self.is_open = True  # whether a rank can still connect

    def rotate(self) -> None:
        """Listen under the present names; connections under the last name are still accepted."""
        slot = current_slot()
        near = range(slot - 1, slot + 2)
        for old in [number for number in self._listeners if number not in near]:
            self._drop(self._listeners.pop(old))
        for old in [number for number in self._taken if number not in near]:
            self._drop(self._taken.pop(old)[0])
        for number in near[1:]:
            if number not in self._listeners and number not in self._taken and self.is_open:
                self._listen(number)

    def close(self) -> None:
        """Close all silent connections, and stop listening."""
        asked = [connection for connection, _ in self._taken.values()]
        for connection in (*self._listeners.values(), *asked, *self._idle):
            self._drop(connection)
        self._listeners.clear()
        self._taken.clear()
        self._idle.clear()

    def _listen(self, slot: int) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            listener.setblocking(False)
            listener.bind(address_of(self._world, slot))
            listener.listen(max(16, self._world.size))
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
            self._ask(slot)
            return
        self._listeners[slot] = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def _ask(self, slot: int) -> None:
        """Probe the process that holds the name: if it has the key, it is a second rank 0, else a stranger."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        nonce = messages.nonce()
        try:
            connection.setblocking(False)
            connection.connect(address_of(self._world, slot))
            connection.send(sealed(self._world.key, b"probe", nonce))
        except OSError:
            connection.close()  # gone meanwhile, or it accepts no connection: tried again
            return
        self._taken[slot] = connection, nonce
        self._selector.register(connection, selectors.EVENT_READ, self._learn)

    def _learn(self, connection: socket.socket) -> None:
        nonce = next((nonce for asked, nonce in self._taken.values() if asked is connection), b"")
        if not nonce:
            return  # closed meanwhile
        self._selector.unregister(connection)
        try:
            message = connection.recv(64)
        except OSError:
            message = b""
        if hmac.compare_digest(message, sign(self._world.key, b"welcome", nonce)):
            self._fail(
                f"another process (pid {peer_of(connection)[0]}) already acts as rank 0 of job {self._world.job!r} on "
                f"{self._world.hostname}; give each job its own HOROVOD_JOB_ID, and each process its own rank"
            )
            self._shut()

    def _accept(self, listener: socket.socket) -> None:
        if listener not in self._listeners.values():
            return  # closed meanwhile
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in messages.OUT_OF_FILES:
                self._make_room()
            return
        connection.setblocking(False)
        if peer_of(connection)[1] != os.getuid():
            connection.close()
        elif not self._hear(connection):
            self._idle[connection] = None
            self._selector.register(connection, selectors.EVENT_READ, self._listen_to)
            if len(self._idle) > self._world.size + _IDLE:
                self._show_out(next(iter(self._idle)))

    def _listen_to(self, connection: socket.socket) -> None:
        if connection in self._idle:
            self._selector.unregister(connection)
            del self._idle[connection]
            if not self._hear(connection):
                connection.close()

    def _make_room(self) -> None:
        """Free descriptors by closing silent connections; without any, report that none is left for the ranks."""
        if not self._idle:
            self._fail(messages.too_many_files(self._world.size))
            self._shut()
        for connection in list(self._idle):
            self._show_out(connection)

    def _shut(self) -> None:
        self.is_open = False
        self.close()

    def _show_out(self, connection: socket.socket) -> None:
        del self._idle[connection]
        self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        if connection in {key.fileobj for key in self._selector.get_map().values()}:
            self._selector.unregister(connection)
        connection.close()
