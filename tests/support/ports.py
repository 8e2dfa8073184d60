"""Ports for programs that can only be told which one to listen at."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

__all__ = ["held_port"]


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A free port of this machine: as long as it is held, the kernel gives it to no program that asks for any port.

    One that asks for this port gets it if it sets SO_REUSEADDR, as servers do.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
