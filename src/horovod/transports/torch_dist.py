"""Gloo: process groups of torch.distributed, made directly. The script's own default group is not touched."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d

from horovod.errors import HorovodInternalError, InitError
from horovod.transports.base import Watch
from horovod.transports.groups import Bytes, Group, Pending, failed, wait_until
from horovod.transports.socket_filter import SocketFilter

if TYPE_CHECKING:
    from horovod.rendezvous.client import JobStore

__all__ = ["TorchGroups", "listen"]

#: Operations of one group that are under way at the same time: one that reduces, one that gathers, and the next.
_THREADS = 3
#: Seconds to wait for the end of pending operations; most of them end at once.
_END_S = 0.2
_LOOPBACK = "127.0.0.1"
#: How many operations torch's flight recorder keeps; the second is its older name.
_RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


class _Table(c10d.Store):
    """Adapts the store of the job to the interface of torch's engines, as far as Gloo uses it."""

    def __init__(self, store: JobStore, prefix: str, timeout_s: float) -> None:
        super().__init__()
        self._store, self._prefix, self._timeout_s = store, prefix, timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(self._prefix + key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._store.get(self._prefix + key, self._timeout_s)

    def wait(self, keys: list[str], limit: timedelta | None = None) -> None:
        limit_s = self._timeout_s if limit is None else limit.total_seconds()
        self._store.wait([self._prefix + key for key in keys], limit_s)


class _Operation:
    """See ``Pending``. ``kept`` is memory that is needed until the operation is over."""

    def __init__(self, work: Any, group: _TorchGroup, *kept: object) -> None:
        self._work, self._group, self._kept = work, group, kept

    def wait(self) -> None:
        group = self._group
        try:
            wait_until(lambda slice_s: _is_over(self._work, slice_s), group.others, group.watch)
        except RuntimeError as error:
            if isinstance(error, HorovodInternalError):
                raise
            raise failed(error, group.name, group.others, group.watch) from None
        self._kept = ()
        group.under_way.discard(self._work)


def _is_over(work: Any, slice_s: float) -> bool:
    """Wait for ``slice_s`` seconds at most; return whether the work is over; raise its error if it has failed."""
    try:
        work.wait(timedelta(seconds=slice_s))
    except RuntimeError:
        if not work.is_completed():
            return False
        # It may have ended just when the time ran out; now ``wait`` returns at once, or raises the error.
        work.wait()
    return True


class _TorchGroup:
    """See ``Group``."""

    def __init__(self, group: Any, ranks: tuple[int, ...], me: int, name: str, watch: Watch) -> None:
        self.ranks, self.me, self.name, self.watch = ranks, me, name, watch
        self.under_way: set[Any] = set()  # operations that have failed or have not ended yet
        self.others = [rank for rank in ranks if rank != ranks[me]]
        self._group = group

    def exchange(
        self, send: Bytes, send_counts: Sequence[int], receive: Bytes, receive_counts: Sequence[int]
    ) -> Pending:
        source, target = _over(send), _over(receive)
        work = self._group.alltoall_base(target, source, list(receive_counts), list(send_counts))
        return self._begun(work, source, target)

    def gather(self, part: Bytes, receive: Bytes, counts: Sequence[int]) -> Pending:
        if len(set(counts)) == 1 and counts[0]:
            source, target = _over(part), _over(receive)
            return self._begun(self._group._allgather_base(target, source), source, target)
        size = len(self.ranks)
        return self.exchange(np.tile(part, size), [len(part)] * size, receive, counts)

    def broadcast(self, data: Bytes, root: int) -> Pending:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        target = _over(data)
        return self._begun(self._group.broadcast([target], options), target)

    def add(self, data: Bytes, dtype: str) -> Pending:
        target = torch.from_numpy(data.view(dtype))
        return self._begun(self._group.allreduce([target]), target)

    def _begun(self, work: Any, *kept: torch.Tensor) -> Pending:
        self.under_way.add(work)
        return _Operation(work, self, *kept)

    def abort(self) -> None:
        """Begin no more operations, and fail those that wait for a connection."""
        self._group.abort()

    def free(self) -> None:
        """Release threads and connections, even if an error still refers to this group."""
        self._group = None
        self.under_way.clear()


def _over(data: Bytes) -> torch.Tensor:
    if not data.flags.writeable:
        # Torch has no read-only tensors and would warn, though the data is only read.
        data = np.frombuffer(memoryview((ctypes.c_char * len(data)).from_address(data.ctypes.data)), np.uint8)
    return torch.from_numpy(data)


class TorchGroups:
    """See ``Groups``. Ranks publish their addresses in ``store``; ``listener`` is the result of ``listen``."""

    name = "gloo"

    def __init__(self, rank: int, store: JobStore, watch: Watch, timeout_s: float, listener: Any) -> None:
        self._rank, self._store, self._watch, self._timeout_s = rank, store, watch, timeout_s
        self._groups: dict[tuple[int, ...], _TorchGroup] = {}
        self._makers: list[threading.Thread] = []
        self._listener, self._filter = listener

    def group(self, ranks: Sequence[int]) -> Group:
        """Return the group of some ranks; the first call connects them and blocks, see ``Groups``."""
        key = tuple(ranks)
        found = self._groups.get(key)
        if found is None:
            me = key.index(self._rank)
            found = _TorchGroup(self._make(key, me), key, me, self.name, self._watch)
            self._groups[key] = found
        return found

    def _make(self, ranks: tuple[int, ...], me: int) -> Any:
        """Connect to the other ranks in a separate thread, since torch waits there without a check of lost ranks."""
        table = _Table(self._store, f"{self.name}/{','.join(map(str, ranks))}/", self._timeout_s)
        made: list[Any] = []

        def connect() -> None:
            try:
                made.append(self._connect(table, me, len(ranks)))
            except Exception as error:
                made.append(error)

        maker = threading.Thread(target=connect, name=f"horovod-{self.name}", daemon=True)
        self._makers.append(maker)
        maker.start()
        others = [rank for rank in ranks if rank != self._rank]

        def is_over(slice_s: float) -> bool:
            maker.join(slice_s)
            return bool(made)

        wait_until(is_over, others, self._watch)
        self._makers.remove(maker)
        if isinstance(made[0], Exception):
            raise failed(made[0], self.name, others, self._watch)
        return made[0]

    def _connect(self, table: _Table, me: int, size: int) -> Any:
        limit = timedelta(seconds=self._timeout_s)
        gloo: Any = c10d.ProcessGroupGloo
        options = gloo._Options()
        options._devices, options._threads, options._timeout = [self._listener], _THREADS, limit
        # This call publishes our address in the table, so peers connect only while the port is open.
        with self._filter.lifted():
            return gloo(table, me, size, options)

    def close(self) -> None:
        """End all groups, and close the store; pending operations fail."""
        self._store.close()
        for group in self._groups.values():
            group.abort()
        if any(group.under_way for group in self._groups.values()):
            # Abort does not end them. The end of their connections does, also at the other end.
            self._filter.end_connections()
        _free(list(self._groups.values()), self._makers)
        self._groups.clear()
        self._listener = None


def _free(groups: Sequence[_TorchGroup], makers: Sequence[threading.Thread]) -> None:
    """Free groups when no operation is pending any more: now if that takes only a moment, else in a thread.

    Freeing a group earlier would wait for its timeout. The ``makers`` are threads that make groups: each waits for the
    store, which is closed, or for a connection, with a limit.
    """

    def is_over() -> bool:
        under_way = [work for group in groups for work in group.under_way]
        return all(work.is_completed() for work in under_way) and not any(maker.is_alive() for maker in makers)

    def free() -> None:
        while not is_over():
            time.sleep(_END_S)
        for group in groups:
            group.free()

    deadline = time.monotonic() + _END_S
    while not is_over() and time.monotonic() < deadline:
        time.sleep(_END_S / 100)
    if is_over():
        free()
    else:
        threading.Thread(target=free, name="horovod-gloo-end", daemon=True).start()


def listen(interface: str = "", address: str = "") -> tuple[Any, SocketFilter]:
    """Return Gloo's listening device, and its filter, for an interface, or if that is empty the one with ``address``,
    or if both are empty for loopback.

    Raises:
        InitError: torch has no Gloo, or this host does not have the interface or address.
    """
    if not dist.is_gloo_available():
        raise InitError("this torch is built without Gloo; install one of the wheels of pytorch.org, or use MPI")
    _record_nothing()
    gloo = c10d.ProcessGroupGloo
    address = address or _LOOPBACK
    place = {"interface": interface} if interface else {"hostname": address}

    def create() -> Any:
        try:
            # If lazy, ranks would connect only when one first sends to another (TORCH_GLOO_LAZY_INIT).
            return gloo.create_device(**place, lazy_init=False)
        except TypeError:
            return gloo.create_device(**place)  # an older torch without this argument

    try:
        return SocketFilter.of(create)
    except RuntimeError as error:
        where = f"HOROVOD_GLOO_IFACE={interface}" if interface else f"the address {address} of this host"
        raise InitError(
            f"Gloo cannot listen on {where}: {error}; name another network interface with HOROVOD_GLOO_IFACE"
        ) from None


def _record_nothing() -> None:
    """Keep torch from recording each operation of Gloo with its stack: kilobytes and tens of microseconds each.

    The setting is read when the recorder of Gloo is first used; that of NCCL is another one, and as the user has it.
    """
    use = getattr(c10d, "_dump_fr_trace_json", None)
    if use is not None and not any(name in os.environ for name in _RECORDER):
        os.environ[_RECORDER[0]] = "0"
        try:
            use(False, False)
        finally:
            del os.environ[_RECORDER[0]]
