"""The conformance suite in jobs of their own: on hosts, on devices and over MPI."""

from __future__ import annotations

import os
from collections.abc import Callable

from conformance import HOSTS, SHAPES, allreduce, everything, moves
from pair_sums import sums_of_a_pair


def pretend(hosts: tuple[tuple[int, ...], ...], init: Callable[[], None]) -> None:
    """Call ``init`` as a rank of a job that has these hosts; as it is, if none are named."""
    from horovod.links.shm import link
    from horovod.transports.topology import Topology

    usual = link.topology_of
    try:
        if hosts:
            link.topology_of = lambda world: Topology(world.rank, hosts)
        init()
    finally:
        link.topology_of = usual


def _init(hosts: tuple[tuple[int, ...], ...], name: str) -> None:
    from horovod import context
    from horovod.bindings import process_sets

    pretend(hosts, process_sets.init)
    assert context.engine().transport.name == name


def between(hosts: tuple[tuple[int, ...], ...], name: str, thorough: bool) -> None:
    _init(hosts, name)
    sums_of_a_pair()
    everything(thorough)


def on_a_paper_device(thorough: bool) -> None:
    from paper_device import on_paper

    from horovod.bindings import process_sets

    on_paper(process_sets.init)
    everything(thorough, "paper")


def on_cuda(hosts: tuple[tuple[int, ...], ...], thorough: bool) -> None:
    """All of it with tensors of a GPU."""
    import torch

    from horovod.bindings import process_sets

    # NCCL refuses two ranks of a host on one GPU, and believes what this says; then they talk over sockets.
    os.environ["NCCL_HOSTID"], os.environ["NCCL_SOCKET_IFNAME"] = f"rank-{os.environ['HOROVOD_RANK']}", "lo"
    torch.set_default_device("cuda")
    try:
        pretend(hosts, process_sets.init)
        everything(thorough)
    finally:
        torch.set_default_device("cpu")


def on_mpi() -> None:
    from horovod.bindings import process_sets

    os.environ["HOROVOD_CPU_OPERATIONS"] = "MPI"
    _init((), "mpi")
    allreduce("torch", "float32", "Average", SHAPES)
    moves("torch", "bfloat16")
    process_sets.shutdown()
    del os.environ["HOROVOD_CPU_OPERATIONS"]
    between(HOSTS["2+2"], "shm and mpi", False)
    process_sets.shutdown()
    print("all of it is right", flush=True)
