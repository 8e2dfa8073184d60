"""Makes the transport of a job whose data is to move over an engine; which one, ``selection`` says."""

from __future__ import annotations

import importlib
from urllib.parse import urlsplit

from horovod.config import Config
from horovod.logs import logger
from horovod.transports.base import Transport, Watch
from horovod.transports.groups import Groups, Store
from horovod.transports.hierarchical.transport import HierarchicalTransport
from horovod.transports.selection import Choice, choose, installed
from horovod.transports.shm.transport import ShmTransport
from horovod.transports.topology import Topology

__all__ = ["between_hosts"]

_REACHED = "address-of-rank-0"


def between_hosts(
    settings: Config,
    launcher: str,
    topology: Topology,
    shm: ShmTransport | None,
    store: Store | None,
    watch: Watch,
) -> Transport | None:
    """Return the transport of this rank; None where shared memory is all that is needed.

    Args:
        settings: say which engine, if the user wants a certain one.
        launcher: who started the job, see ``World.launcher``.
        topology: which ranks share a host.
        shm: of this rank's host, used for nothing before; closed by what is returned.
        store: where ranks say where they listen; closed by what is returned. MPI needs none.
        watch: asked about ranks, by their numbers in the job.

    Raises:
        InitError: what is needed is not there.
    """
    choice = choose(settings, launcher, len(topology.hosts) > 1, installed())
    if choice is None:
        return None
    if topology.rank == 0:
        logger.info(str(choice))
    groups = _groups(choice, settings, topology, store, watch)
    if shm is None or not choice.is_hierarchical:
        transport = HierarchicalTransport(topology, groups, watch)
        transport.adopt(shm)
        return transport
    size = shm.control.size
    # In a test, several hosts may be parts of one.
    indices = {rank: rank for rank in range(size)} if size == topology.size else None
    return HierarchicalTransport(topology, groups, watch, shm, indices)


def _groups(choice: Choice, settings: Config, topology: Topology, store: Store | None, watch: Watch) -> Groups:
    groups: Groups
    if choice.engine == "mpi":
        module = importlib.import_module("horovod.transports.mpi")
        groups = module.MpiGroups(topology.rank, topology.size, watch, settings.mpi_threads_disable)
        return groups
    assert store is not None
    module = importlib.import_module("horovod.transports.torch_dist")
    address = "" if settings.gloo_iface else _address(topology, store, module.address_towards)
    limit_s = settings.gloo_timeout_s
    groups = module.TorchGroups(choice.engine, topology.rank, store, watch, limit_s, settings.gloo_iface, address)
    return groups


def _address(topology: Topology, store: Store, towards: object) -> str:
    """Return the address of this host at which the others reach it."""
    own = str(towards(store.endpoint)) if callable(towards) else ""
    if len(topology.hosts) == 1 or not store.endpoint.startswith("tcp:"):
        return own
    if topology.mine is topology.hosts[0]:
        # Of several addresses of the host of rank 0, one at which another host has reached it.
        return store.get(_REACHED).decode()
    if topology.rank == topology.mine[0]:
        store.set(_REACHED, (urlsplit(store.endpoint).hostname or "").encode())
    return own
