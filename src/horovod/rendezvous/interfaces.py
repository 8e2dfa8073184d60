"""Under which addresses other hosts may find this one, and which of them leads to a certain host.

The kernel lists the addresses over netlink. Source: netlink(7), rtnetlink(7).
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from horovod.errors import InitError

__all__ = ["endpoint", "leading_address", "machine_name", "own_addresses"]

_MOST = 16
_HEADER, _ADDRESS, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct("=HH")
_GETADDR, _DONE, _ERROR, _REQUEST_DUMP = 22, 3, 2, 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_UNIVERSE, _SITE, _HOST = 0, 200, 254  # scopes; what is valid on one link alone needs its name, too
_NOT_YET = 0x40 | 0x08 | 0x20  # tentative, duplicate, deprecated


def own_addresses(interfaces: Sequence[str] = ()) -> list[str]:
    """Return the addresses of this host at which others may reach it; those of loopback if it has no others.

    Args:
        interfaces: names of the network interfaces to use, the best one first; all of them when empty.

    Raises:
        InitError: there is no such interface, or it has no address.
    """
    found = list(_listed())
    names = [name for _, name in socket.if_nameindex()]
    if wrong := [name for name in interfaces if name not in names]:
        raise InitError(f"there is no network interface {', '.join(wrong)} on this host; it has {', '.join(names)}")
    if interfaces:
        chosen = [address for wanted in interfaces for name, _, address in found if name == wanted]
        if not chosen:
            raise InitError(f"the network interface {', '.join(interfaces)} of this host has no address")
        return chosen[:_MOST]
    reachable = [address for _, scope, address in found if scope in (_UNIVERSE, _SITE)]
    # Of the kinds of addresses, that which every host has first.
    reachable.sort(key=lambda address: ":" in address)
    return reachable[:_MOST] or ["127.0.0.1"]


def _listed() -> Iterator[tuple[str, int, str]]:
    """Interface, scope and address of all that can be used."""
    for family, flags, scope, index, address in _dump():
        if scope in (_UNIVERSE, _SITE, _HOST) and not flags & _NOT_YET:
            try:
                yield socket.if_indextoname(index), scope, socket.inet_ntop(family, address)
            except OSError:
                continue  # gone meanwhile


def _dump() -> Iterator[tuple[int, int, int, int, bytes]]:
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
            kernel.settimeout(5.0)
            request = _HEADER.pack(_HEADER.size + 8, _GETADDR, _REQUEST_DUMP, 1, 0) + bytes(8)
            kernel.send(request)
            while True:
                data = kernel.recv(1 << 16)
                while len(data) >= _HEADER.size:
                    nbytes, kind, _, _, _ = _HEADER.unpack_from(data)
                    if kind in (_DONE, _ERROR) or nbytes < _HEADER.size:
                        return
                    yield from _address(data[_HEADER.size : nbytes])
                    data = data[(nbytes + 3) & ~3 :]
    except OSError:
        return  # a kernel, or a sandbox, without netlink: loopback alone is known


def _address(message: bytes) -> Iterator[tuple[int, int, int, int, bytes]]:
    family, _, flags, scope, index = _ADDRESS.unpack_from(message)
    attributes, rest = {}, message[_ADDRESS.size :]
    while len(rest) >= _ATTRIBUTE.size:
        nbytes, kind = _ATTRIBUTE.unpack_from(rest)
        if nbytes < _ATTRIBUTE.size:
            break
        attributes[kind] = rest[_ATTRIBUTE.size : nbytes]
        rest = rest[(nbytes + 3) & ~3 :]
    address = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
    if family in (socket.AF_INET, socket.AF_INET6) and address:
        yield family, flags, scope, index, address


def endpoint(address: str, port: int | str) -> str:
    """Return ``tcp://address:port``, with an address of IPv6 in brackets."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def leading_address(where: str) -> str:
    """Return the address of this host that leads to an endpoint; empty when none does.

    Args:
        where: such as ``tcp://10.0.0.1:5000``.
    """
    host, _, port = where.removeprefix("tcp://").rpartition(":")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing
            address: str = probe.getsockname()[0]
            return str(ipaddress.ip_address(address.partition("%")[0]))
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return ""


def machine_name() -> str:
    """Return a text of this machine; containers with a network of their own count as machines."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
