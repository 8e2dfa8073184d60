"""Recognizes names and addresses of this machine."""

from __future__ import annotations

import os
import socket

__all__ = ["is_this_host"]


def is_this_host(name: str) -> bool:
    """Whether ``name`` is a name or an address of this machine. May ask the name service."""
    own = os.uname().nodename
    if name in ("localhost", "::1", own, own.split(".")[0]) or name.startswith("127."):
        return True
    try:
        addresses = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in addresses)


def _can_bind(family: int, address: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]) -> bool:
    """Whether a socket can listen on an address, which only addresses of this machine allow."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True
