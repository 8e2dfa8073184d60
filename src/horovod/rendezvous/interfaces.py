"""Lists the addresses at which other hosts may reach this one, and finds the one that leads to a given host."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import ifaddr

from horovod.errors import InitError

__all__ = ["endpoint", "leading_address", "machine_name", "own_addresses"]

_MOST = 16


def own_addresses(interfaces: Sequence[str] = ()) -> list[str]:
    """Return the addresses of this host, on these interfaces or on all, at which others may reach it; the best one
    first. If it has no others, they are those of loopback.

    Raises:
        InitError: an interface does not exist, or has no address.
    """
    found = list(_listed())
    names = [name for _, name in socket.if_nameindex()]
    if wrong := [name for name in interfaces if name not in names]:
        raise InitError(f"there is no network interface {', '.join(wrong)} on this host; it has {', '.join(names)}")
    if interfaces:
        chosen = [address for wanted in interfaces for name, address in found if name == wanted]
        if not chosen:
            raise InitError(f"the network interface {', '.join(interfaces)} of this host has no address")
        return chosen[:_MOST]
    reachable = [address for _, address in found if not ipaddress.ip_address(address).is_loopback]
    # IPv4 addresses first: every host has one.
    reachable.sort(key=lambda address: ":" in address)
    return reachable[:_MOST] or ["127.0.0.1"]


def _listed() -> Iterator[tuple[str, str]]:
    """Yield interface name and address of all adapters, loopback included, without link-local addresses."""
    for adapter in ifaddr.get_adapters():
        for found in adapter.ips:
            address = str(found.ip[0] if isinstance(found.ip, tuple) else found.ip)
            if not ipaddress.ip_address(address).is_link_local:
                yield adapter.name.partition(":")[0], address  # without the label of an alias


def endpoint(address: str, port: int | str) -> str:
    """Return ``tcp://address:port``, with an address of IPv6 in brackets."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def leading_address(where: str) -> str:
    """Return the address of this host from which packets to an endpoint leave; empty when none do."""
    host, _, port = where.removeprefix("tcp://").rpartition(":")
    try:
        for family, kind, protocol, _, target in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe:
                if probe.connect_ex(target) == 0:  # sends nothing
                    address: str = probe.getsockname()[0]
                    return address
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise
    return ""


def machine_name() -> str:
    """Return an identifier of this machine; a container with its own network counts as a machine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
