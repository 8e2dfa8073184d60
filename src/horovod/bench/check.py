"""``horovodrun --check``: tests the network between the hosts of a job. One rank on each host runs it."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from horovod import context
from horovod.bench.control import Agreement
from horovod.bench.host import versions
from horovod.bench.network import run_network
from horovod.errors import InitError
from horovod.rendezvous.interfaces import own_addresses
from horovod.world import detect

__all__ = ["advice", "main"]

_CLOCK_S, _LATENCY_S, _SLOW_BYTES_S = 1.0, 5e-3, 125e6
_CONNECT_S = 3.0
_ROUNDS, _LARGE_BYTES = 3, 16 << 20


def advice(
    clocks: Mapping[str, float], versions: Mapping[str, Mapping[str, str]], rows: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return a sentence for each thing to fix, from the clocks of the hosts at one moment, the versions of their
    packages and the rows of ``run_network``.
    """
    found = []
    first = next(iter(clocks))
    for host, clock in clocks.items():
        if abs(ahead_s := clock - clocks[first]) > _CLOCK_S:
            where = "ahead of" if ahead_s > 0 else "behind"
            found.append(
                f"the clock of {host} is {abs(ahead_s):.0f} s {where} that of {first}; "
                f"let both follow a time server (chrony, NTP)"
            )
    for package in dict.fromkeys(name for there in versions.values() for name in there):
        by_host = {host: there.get(package, "missing") for host, there in versions.items()}
        if len(set(by_host.values())) > 1:
            said = ", ".join(f"{version} on {host}" for host, version in by_host.items())
            found.append(f"{package} differs: {said}; install the same version on all hosts")
    best = max((row["bytes_s"] for row in rows), default=0.0)
    for row in rows:
        if row["bytes_s"] < max(_SLOW_BYTES_S, best / 2) or row["latency_s"] > _LATENCY_S:
            found.append(
                f"the network between {row['hosts']} is slow: {_shown(row)}; name a faster interface with "
                f"--network-interfaces, or look at cable, switch and other load"
            )
    return found


def _unreachable(control: Agreement, names: Sequence[str]) -> list[str]:
    """Return a sentence for each host to which another one cannot open a connection; called on all ranks. Gloo would
    wait for minutes, and then name an address.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=control.size, dualstack_ipv6=both) as listener:
        own = own_addresses(context.config().interfaces), listener.getsockname()[1]
        there = control.gather(own)
        found = [
            f"{names[control.rank]} cannot connect to {name} at {', '.join(addresses)}; look for a firewall and at the "
            f"routes, or name another network with --network-interfaces"
            for name, (addresses, port) in zip(names, there, strict=True)
            if not any(_opens(address, port) for address in addresses)
        ]
        return [sentence for each in control.gather(found) for sentence in each]


def _opens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), _CONNECT_S).close()
    except OSError:
        return False
    return True


def _shown(row: Mapping[str, Any]) -> str:
    return f"{row['bytes_s'] / 1e9:.2f} GB/s, {row['latency_s'] * 1e3:.2f} ms for 64 B"


def main() -> int:
    """Entry point of each rank."""
    import horovod.numpy as hvd

    try:
        hvd.init()
    except InitError as error:  # such as no torch on this host: advice, so no traceback
        print(f"to fix: {error}", file=sys.stderr)
        return 1
    control = Agreement(hvd)
    names = control.gather(detect().hostname)
    control.barrier()
    clocks = dict(zip(names, control.gather(time.time()), strict=True))
    installed = dict(zip(names, control.gather(versions()), strict=True))
    rows: list[dict[str, Any]] = []
    apart = _unreachable(control, names)
    if len(names) > 1 and not apart:
        rows = run_network(control, lambda *_: None, rounds=_ROUNDS, large=_LARGE_BYTES)
    if control.rank == 0:
        print(f"{len(names)} host{'s' * (len(names) > 1)} reached, with the same khorovod: {', '.join(names)}")
        for row in rows:
            print(f"{row['hosts']}: {_shown(row)}")
        found = apart + advice(clocks, installed, rows)
        for sentence in found or ["nothing to fix"]:
            print(f"to fix: {sentence}" if found else sentence)
    hvd.shutdown()
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
