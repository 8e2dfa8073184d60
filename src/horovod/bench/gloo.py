"""torch.distributed over Gloo, in the same rank processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, TCPStore

from horovod.bench.cases import Case
from horovod.bench.control import Control
from horovod.bench.inprocess import InProcess
from horovod.transports.torch_dist import address_towards
from horovod.world import detect

__all__ = ["Gloo", "interface_of", "start_gloo", "stop_gloo"]

_SIOCGIFADDR = 0x8915  # netdevice(7)


def start_gloo(control: Control) -> None:
    """Make Gloo's default process group, on every rank: over the loopback on one host, else over what joins the hosts.

    On one host the store is a file that only this user can read: no port, and nobody to guess it.
    """
    hosts = control.gather(detect().hostname)
    if len(set(hosts)) > 1:
        _start_between_hosts(control, hosts[0])
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    directory = control.broadcast(tempfile.mkdtemp(prefix="horovod-bench-") if control.rank == 0 else "")
    store = FileStore(str(Path(directory) / "store"), control.size)
    dist.init_process_group("gloo", store=store, rank=control.rank, world_size=control.size)
    control.barrier()
    if control.rank == 0:
        shutil.rmtree(directory, ignore_errors=True)


def _start_between_hosts(control: Control, host: str) -> None:
    """As torch's own programs do it: the store is a port of rank 0's host, for whoever comes."""
    store = None
    if control.rank == 0:
        store = TCPStore(host, 0, control.size, is_master=True, wait_for_workers=False)
    port = control.broadcast(store.port if store is not None else 0)
    if store is None:
        store = TCPStore(host, port, control.size, is_master=False)
    # Without a name, torch asks what the name of this host stands for, which may be its loopback.
    os.environ.setdefault(
        "GLOO_SOCKET_IFNAME", interface_of(address_towards(f"tcp://{socket.gethostbyname(host)}:{port}"))
    )
    dist.init_process_group("gloo", store=store, rank=control.rank, world_size=control.size)
    control.barrier()


def interface_of(address: str) -> str:
    """Return the network interface that has an IPv4 address.

    Raises:
        LookupError: none has it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24]
            except OSError:
                continue  # it has none
            if socket.inet_ntoa(found) == address:
                return name
    raise LookupError(f"no network interface of this host has the address {address}; set GLOO_SOCKET_IFNAME")


def stop_gloo(control: Control) -> None:
    """End Gloo's default process group on every rank."""
    control.barrier()
    dist.destroy_process_group()


def _first(*names: str) -> Callable[..., Any]:
    """The first of ``names`` that this torch has; newer releases renamed the single-tensor collectives."""
    for name in names:
        if hasattr(dist, name):
            function: Callable[..., Any] = getattr(dist, name)
            return function
    raise AttributeError(f"torch.distributed has none of {names}")


class Gloo(InProcess):
    """The engine that torch itself offers between CPU processes."""

    def __init__(self, control: Control) -> None:
        super().__init__("gloo", control)
        start_gloo(control)

    def why_not(self, case: Case) -> str:
        """Gloo takes every case."""
        return ""

    def _allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype)

    def _bind(self, case: Case, inputs: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        tensor, size = inputs[0], self._control.size
        if case.op == "async":
            return lambda: _all_at_once(inputs)
        if case.op == "allreduce":
            return lambda: _in_place(dist.all_reduce, tensor)
        if case.op == "broadcast":
            return lambda: _in_place(dist.broadcast, tensor, 0)
        if case.op == "allreduce-new":
            # It knows allreduces in place only.
            new = torch.empty_like(tensor)
            return lambda: _in_place(dist.all_reduce, new.copy_(tensor))
        names, count = {
            "allgather": (("all_gather_single", "all_gather_into_tensor"), tensor.numel() * size),
            "reducescatter": (("reduce_scatter_single", "reduce_scatter_tensor"), tensor.numel() // size),
            "alltoall": (("all_to_all_single",), tensor.numel()),
        }[case.op]
        output, function = tensor.new_empty(count), _first(*names)

        def out_of_place() -> list[torch.Tensor]:
            function(output, tensor)
            return [output]

        return out_of_place

    def close(self) -> None:
        """End the process group."""
        stop_gloo(self._control)


def _in_place(function: Callable[..., Any], tensor: torch.Tensor, *args: Any) -> list[torch.Tensor]:
    function(tensor, *args)
    return [tensor]


def _all_at_once(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    return tensors
