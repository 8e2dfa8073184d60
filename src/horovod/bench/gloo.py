"""Gloo's process group, and the network interface that joins the hosts of a job."""

from __future__ import annotations

import ipaddress
import os
import shutil
import tempfile
from pathlib import Path

import ifaddr
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, TCPStore

from horovod.bench.control import Agreement
from horovod.world import detect

__all__ = ["common_interface", "start_gloo", "stop_gloo"]


def start_gloo(control: Agreement) -> None:
    """Make Gloo's default process group; called on all ranks.

    On one host the store is a file that only this user can read; between hosts it is a port of rank 0's host, as in
    torch's own programs.
    """
    is_one_host = len(set(control.gather(detect().hostname))) == 1
    # Without a name, torch resolves the name of this host, which may be its loopback.
    if is_one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        directory = control.broadcast(tempfile.mkdtemp(prefix="horovod-bench-") if control.rank == 0 else "")
        store: FileStore | TCPStore = FileStore(str(Path(directory) / "store"), control.size)
    else:
        interface, address = common_interface(control)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        address = control.broadcast(address)
        own = TCPStore(address, 0, control.size, is_master=True, wait_for_workers=False) if control.rank == 0 else None
        port = control.broadcast(own.port if own is not None else 0)
        store = own or TCPStore(address, port, control.size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=control.rank, world_size=control.size)
    control.barrier()
    if is_one_host and control.rank == 0:
        shutil.rmtree(directory, ignore_errors=True)


def stop_gloo(control: Agreement) -> None:
    """End Gloo's default process group on every rank."""
    control.barrier()
    dist.destroy_process_group()


def common_interface(control: Agreement) -> tuple[str, str]:
    """Return name and IPv4 address of this host's interface in the network that all hosts share; called on all ranks.

    Host names are not resolved. Without a common network, the first interface of each host is taken.

    Raises:
        LookupError: a host has no IPv4 address except its loopback.
    """
    own = [
        (adapter.name, str(ip.ip), str(ipaddress.ip_network(f"{ip.ip}/{ip.network_prefix}", strict=False)))
        for adapter in ifaddr.get_adapters()
        for ip in adapter.ips
        if ip.is_IPv4 and not ipaddress.ip_address(str(ip.ip)).is_loopback
    ]
    everywhere = control.gather(own)
    if not all(everywhere):
        raise LookupError("a host has no IPv4 address except its loopback; set GLOO_SOCKET_IFNAME")
    networks = [{network for _, _, network in found} for found in everywhere]
    common = next((network for _, _, network in everywhere[0] if all(network in each for each in networks)), None)
    return next((name, address) for name, address, network in own if common in (None, network))
