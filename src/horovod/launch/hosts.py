"""Reads ``-H`` and host files, recognizes this machine, and places ranks on hosts."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["HostSlots", "Place", "is_this_host", "parse_hostfile", "parse_hosts", "place"]

_WRONG = r"\s,;=\[\]:\"'\x00-\x1f\x7f\ud800-\udfff"
_NAME = re.compile(f"[^{_WRONG}-][^{_WRONG}]*")
_NUMBER = re.compile(r"0*[1-9][0-9]{0,5}")


@dataclass(frozen=True)
class HostSlots:
    """A machine and how many ranks may run on it."""

    name: str
    slots: int


@dataclass(frozen=True)
class Place:
    """A machine and how many ranks run on it."""

    name: str  # as the user named it
    count: int  # number of ranks
    is_here: bool  # whether it is this machine


def parse_hosts(text: str) -> list[HostSlots]:
    """Read ``localhost:2,other:4``; a host without a number has one slot, IPv6 addresses stand in ``[]``.

    Raises:
        ValueError: an entry is not of that form.
    """
    entries = text.split(",") if isinstance(text, str) else []
    hosts = [_host(entry.strip(), "", f"-H {text}") for entry in entries if entry.strip()]
    if slip := [host.name for host in hosts[1:] if host.name.isdecimal()]:
        raise ValueError(f"-H {text}: {slip[0]} is no host; give the number of slots after a colon: host:{slip[0]}")
    if not hosts:
        raise ValueError(f"-H {text!r} names no host; give one text with host:slots, such as localhost:2,other:4")
    return hosts


def parse_hostfile(text: str, source: str, slots: int = 1, *, allows_zero: bool = False) -> list[HostSlots]:
    """Read a host file: ``host slots=n`` (or ``host:n``, or ``host``, which has ``slots``) on each line, ``#`` starts a
    comment.

    Raises:
        ValueError: a line is not of that form; names the file and the line.
    """
    hosts = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if not words:
            continue
        where = f"{source}, line {number}"
        values = dict(word.partition("=")[::2] for word in words[1:])
        wrong = [key for key in values if key not in ("slots", "max_slots", "max-slots") or not values[key]]
        if wrong:
            raise ValueError(f"{where}: expected `host slots=n`, received {line.strip()!r}")
        hosts.append(_host(words[0], values.get("slots", ""), where, slots, allows_zero))
    if not hosts:
        raise ValueError(f"{source} names no host; write lines such as `localhost slots=2`")
    return hosts


def _host(entry: str, slots: str, where: str, default: int = 1, allows_zero: bool = False) -> HostSlots:
    user, at, host = entry.rpartition("@")
    if host.startswith("["):
        name, end, rest = host[1:].partition("]")
        is_name = bool(end) and _is_ipv6(name) and (not rest or (rest[0] == ":" and len(rest) > 1))
        number = slots or rest[1:]
    elif host.count(":") == 1 and not host.endswith(":"):
        name, _, number = host.partition(":")
        number, is_name = slots or number, bool(_NAME.fullmatch(name))
    else:
        name, number = host, slots
        is_name = bool(_NAME.fullmatch(host)) or _is_ipv6(host)
    is_number = _NUMBER.fullmatch(number or "1") or (allows_zero and not number.strip("0"))
    if not is_name or (at and not _NAME.fullmatch(user)) or not is_number:
        raise ValueError(
            f"{where}: expected a host and a number of slots{'' if allows_zero else ' above 0'}, "
            f"received {f'{entry} slots={slots}' if slots else entry!r}"
        )
    return HostSlots(user + at + name, int(number or default))


def _is_ipv6(name: str) -> bool:
    try:
        ipaddress.IPv6Address(name)
    except ValueError:
        return False
    return True


def place(hosts: Sequence[HostSlots], num_proc: int, is_this_host: Callable[[str], bool]) -> list[Place]:
    """Return the number of ranks on each host; hosts fill up in order. All names of this machine count as one host.

    Raises:
        ValueError: too few slots.
    """
    slots = sum(host.slots for host in hosts)
    named = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    if num_proc > slots:
        raise ValueError(
            f"Requested more processes ({num_proc}) than there are available slots ({slots}) on {named}; "
            f"lower -np or give the hosts more slots"
        )
    room: dict[str, int] = {}
    first_here = ""
    for host in hosts:
        name = host.name
        if is_this_host(name):
            name = first_here = first_here or name
        room[name] = room.get(name, 0) + host.slots
    places, left = [], num_proc
    for name, count in room.items():
        if left:
            places.append(Place(name, min(count, left), name == first_here))
            left -= places[-1].count
    return places


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
