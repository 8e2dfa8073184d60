"""The network interfaces of this machine, by subnet."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

import ifaddr

from poprun.flags import CommandLineError

__all__ = ["addresses_here", "interfaces_of"]


def addresses_here() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one."""
    return {found.name: str(ip.ip) for found in ifaddr.get_adapters() for ip in found.ips if ip.is_IPv4}


def interfaces_of(networks: Sequence[str], addresses: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of interfaces.

    Args:
        networks: names, which stay unchanged, and subnets such as 10.1.0.0/16.
        addresses: addresses by interface.

    Raises:
        ValueError: no interface of this machine is in a subnet.
    """
    found: list[str] = []
    for network in networks:
        try:
            subnet = ipaddress.ip_network(network, strict=False)
        except ValueError:
            names = [network]
        else:
            names = [name for name, address in addresses.items() if ipaddress.ip_address(address) in subnet]
            if not names:
                there = ", ".join(f"{name} {address}" for name, address in addresses.items())
                raise CommandLineError(f"no interface of this machine has an address in {network}; there are {there}")
        found += [name for name in names if name not in found]
    return tuple(found)
