"""Filters the listening socket of an engine that accepts strangers: no packet passes while no rank is expected.

Gloo keeps every incoming connection, also from strangers, and ends the process when it has no descriptor left. So the
kernel drops all packets to the listening socket, except while a group is being made. Existing connections stay.
Source: socket(7), SO_ATTACH_FILTER; Documentation/networking/filter.rst of Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

__all__ = ["SocketFilter", "listening"]

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
#: One instruction of the kernel's filters: accept no byte of a packet.
_TAKE_NOTHING = struct.pack("=HBBI", 0x06, 0, 0, 0)
_T = TypeVar("_T")


class SocketFilter:
    """Refuses packets to the listening socket with this inode, except in ``lifted``; filters nothing if it is empty."""

    def __init__(self, inode: str = "") -> None:
        self._inode = inode
        self._lock = threading.Lock()
        self._users = 0
        self._set(_SO_ATTACH_FILTER)

    @classmethod
    def of(cls, make: Callable[[], _T]) -> tuple[_T, SocketFilter]:
        """Return the result of ``make``, and the filter of its listening socket."""
        before = listening()
        made = make()
        new = [inode for inode in listening() if inode not in before]
        # Another thread may have opened a socket at the same moment; then the right one is not known.
        return made, cls(new[0] if len(new) == 1 else "")

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Accept connections while the block runs."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._set(_SO_DETACH_FILTER)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._set(_SO_ATTACH_FILTER)

    def end_connections(self) -> None:
        """End the accepted connections, for both ends, also while a thread waits for their data."""
        fd = listening().get(self._inode, -1) if self._inode else -1
        if fd < 0:
            return
        with contextlib.suppress(OSError):  # the engine may close it at this moment
            with _borrowed(fd) as listener:
                family, port = listener.family, listener.getsockname()[1]
            for _, sock in _sockets():
                # The other end may have ended it, or another thread may have closed it.
                with contextlib.suppress(OSError):
                    if sock.family == family and sock.getsockname()[1] == port and not _listens(sock):
                        sock.shutdown(socket.SHUT_RDWR)

    def _set(self, order: int) -> None:
        # The descriptor's number may belong to another file by now.
        fd = listening().get(self._inode, -1) if self._inode else -1
        if fd < 0:
            return
        code = ctypes.create_string_buffer(_TAKE_NOTHING, len(_TAKE_NOTHING))
        program = struct.pack("@HL", 1, ctypes.addressof(code))
        # A sandbox may not support filters: then the socket accepts everybody.
        with contextlib.suppress(OSError), _borrowed(fd) as sock:
            sock.setsockopt(socket.SOL_SOCKET, order, program)


def listening() -> dict[str, int]:
    """Return the sockets on which this process listens: inodes and descriptors."""
    found = {}
    for inode, sock in _sockets():
        # Another thread may close it at this moment.
        with contextlib.suppress(OSError):
            if _listens(sock):
                found[inode] = sock.fileno()
    return found


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets() -> Iterator[tuple[str, socket.socket]]:
    """Return the inodes and sockets of this process; each socket is valid until the next one."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers
        with contextlib.suppress(OSError):
            inode = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115 - no file
            if inode.startswith("socket:"):
                with _borrowed(int(name)) as sock:
                    yield inode, sock


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    sock = socket.socket(fileno=fd)
    try:
        yield sock
    finally:
        sock.detach()
