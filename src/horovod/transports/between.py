"""Makes the transport of a job: shared memory, and the engines that ``selection`` names."""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from horovod.config import Config
from horovod.errors import InitError
from horovod.logs import logger
from horovod.transports.base import Transport, Watch
from horovod.transports.groups import Groups, wait_until
from horovod.transports.hierarchical.mailbox import Mailbox
from horovod.transports.selection import choose, installed, wants_nccl
from horovod.transports.shm.transport import ShmTransport
from horovod.transports.topology import Topology

if TYPE_CHECKING:
    from horovod.rendezvous.client import JobStore

__all__ = ["make_transport", "preload"]

_REACHED = "address-of-rank-0"
#: Module of each engine; imported only where the engine is used, because engines take a while to load.
_MODULES = {"mpi": "mpi", "gloo": "torch_dist"}


def preload(settings: Config, launcher: str) -> None:
    """Import the engine between hosts."""
    with contextlib.suppress(InitError, ImportError):  # the ranks report it when they need the engine
        choice = choose(settings, launcher, True, installed())
        if choice is not None:
            _module_of(choice.engine)


def _module_of(engine: str) -> Any:
    importlib.import_module("horovod.transports.hierarchical.transport")
    return importlib.import_module(f"horovod.transports.{_MODULES[engine]}")


def make_transport(
    settings: Config,
    launcher: str,
    topology: Topology,
    shm: ShmTransport,
    open_store: Callable[[], JobStore],
    watch: Watch,
    mailbox: Mailbox | None = None,
) -> Transport:
    """Return the transport of this rank, which closes ``shm``, the unused transport of its host, and the table of
    ``open_store``, in which ranks publish their addresses if an engine needs that. No data travels with requests if
    ``mailbox`` is None.

    Raises:
        InitError: a requirement of an engine is missing.
    """
    there = installed()
    choice = choose(settings, launcher, len(topology.hosts) > 1, there)
    with_nccl = wants_nccl(settings, there)
    if topology.rank == 0 and choice is not None:
        logger.info(str(choice))
    if with_nccl:
        # Report an error of this host before the other hosts are needed.
        importlib.import_module("horovod.transports.nccl").check_nccl()
        if topology.rank == 0:
            logger.info("tensors of a GPU move over nccl (HOROVOD_GPU_OPERATIONS)")
    made: list[Groups] = []
    with contextlib.ExitStack() as opened:

        @functools.cache
        def the_store() -> JobStore:
            store = open_store()
            opened.callback(store.close)
            return store

        for engine in dict.fromkeys((choice.engine, choice.device_engine) if choice is not None else ()):
            made.append(_groups(engine, settings, topology, the_store, watch))
            opened.callback(made[-1].close)
        if with_nccl:
            nccl = importlib.import_module("horovod.transports.nccl").NcclGroups(topology.rank, the_store(), watch)
        opened.pop_all()
    transport = shm if choice is None else _over(made, choice.is_hierarchical, topology, shm, mailbox)
    if not with_nccl:
        return transport
    on_device = importlib.import_module("horovod.transports.on_device")
    with_devices: Transport = on_device.DeviceTransport(transport, nccl)
    return with_devices


def _over(
    made: Sequence[Groups], is_hierarchical: bool, topology: Topology, shm: ShmTransport, mailbox: Mailbox | None
) -> Transport:  # fmt: skip
    """Return the transport over the first engine; it moves data of devices over the last engine."""
    from horovod.transports.hierarchical.transport import HierarchicalTransport

    if not is_hierarchical:
        return HierarchicalTransport(topology, made[0], device_groups=made[-1], mailbox=mailbox, closes=shm)
    size = shm.control.size
    # In a test, several hosts may be parts of one machine.
    indices = {rank: rank for rank in range(size)} if size == topology.size else None
    return HierarchicalTransport(topology, made[0], shm, indices, made[-1], mailbox)


def _groups(
    engine: str, settings: Config, topology: Topology, open_store: Callable[[], JobStore], watch: Watch
) -> Groups:  # fmt: skip
    groups: Groups
    module = _module_of(engine)
    if engine == "mpi":
        groups = module.MpiGroups(topology.rank, topology.size, watch, settings.mpi_threads_disable)
        return groups
    # With several interfaces, the one that leads to rank 0 is known once its store was reached.
    is_certain = settings.gloo_iface and "," not in settings.gloo_iface
    listener = module.listen(settings.gloo_iface) if is_certain else None
    store = open_store()
    if listener is None:
        from horovod.rendezvous.interfaces import leading_address  # takes a while to load

        address = _address(topology, store, leading_address, watch, settings.start_timeout_s)
        listener = module.listen(address=address)
    groups = module.TorchGroups(topology.rank, store, watch, settings.gloo_timeout_s, listener)
    return groups


def _address(topology: Topology, store: JobStore, towards: Callable[[str], str], watch: Watch, limit_s: float) -> str:
    """Return the address at which other hosts reach this host: the one from which packets to an endpoint leave, or "".

    Gloo wants one address family on all ranks, but each rank has reached the store at the first address that answered.
    So the address that the second host's first rank has reached decides for all; it is waited for.

    Raises:
        PeerLostError: that rank is lost.
        TimeoutError: that rank has published nothing.
    """
    own = towards(store.endpoint)
    if len(topology.hosts) == 1 or not store.endpoint.startswith("tcp:"):
        return own
    parts = urlsplit(store.endpoint)
    if topology.rank == topology.hosts[1][0]:
        store.set(_REACHED, (parts.hostname or "").encode())
        return own
    reached = _said_by(topology.hosts[1][0], store, watch, limit_s)
    if topology.mine is topology.hosts[0]:
        # Rank 0's host may have several addresses: take one at which another host has reached it.
        return reached
    if (":" in reached) == (":" in own):
        return own
    return towards(f"tcp://[{reached}]:{parts.port}" if ":" in reached else f"tcp://{reached}:{parts.port}")


def _said_by(rank: int, store: JobStore, watch: Watch, limit_s: float) -> str:
    """Return the address at which a rank has reached the store."""
    found: list[bytes] = []
    deadline = time.monotonic() + limit_s

    def has_come(slice_s: float) -> bool:
        try:
            found.append(store.get(_REACHED, slice_s))
        except TimeoutError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} did not publish its address of rank 0 within {limit_s:g} s") from None
        return bool(found)

    wait_until(has_come, [rank], watch)
    return found[0].decode()
