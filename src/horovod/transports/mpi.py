"""MPI, through mpi4py: nonblocking operations on bytes, polled until they are over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mpi4py
import numpy as np

from horovod.errors import InitError
from horovod.transports.base import Watch
from horovod.transports.groups import Bytes, Group, Pending, failed, look_for, wait_until

__all__ = ["MpiGroups"]


class _Operation:
    """See ``Pending``. ``kept`` is memory that is needed until the operation is over."""

    def __init__(self, request: Any, group: _MpiGroup, kept: object) -> None:
        self._request, self._group, self._kept = request, group, kept

    def wait(self) -> None:
        request, group = self._request, self._group
        try:
            wait_until(lambda slice_s: look_for(request.Test, slice_s), group.others, group.watch)
        except group.error as error:
            raise failed(error, "mpi", group.others, group.watch) from None
        self._kept = None


class _MpiGroup:
    """See ``Group``."""

    def __init__(self, communicator: Any, ranks: tuple[int, ...], me: int, mpi: Any, watch: Watch) -> None:
        self.ranks, self.me, self.watch, self.error = ranks, me, watch, mpi.Exception
        self.others = [rank for rank in ranks if rank != ranks[me]]
        self.communicator = communicator
        self._byte, self._in_place = mpi.BYTE, mpi.IN_PLACE

    def exchange(
        self, send: Bytes, send_counts: Sequence[int], receive: Bytes, receive_counts: Sequence[int]
    ) -> Pending:
        request = self.communicator.Ialltoallv(
            [send, list(send_counts), _starts(send_counts), self._byte],
            [receive, list(receive_counts), _starts(receive_counts), self._byte],
        )
        return _Operation(request, self, (send, receive))

    def gather(self, part: Bytes, receive: Bytes, counts: Sequence[int]) -> Pending:
        request = self.communicator.Iallgatherv(
            [part, len(part), self._byte], [receive, list(counts), _starts(counts), self._byte]
        )
        return _Operation(request, self, (part, receive))

    def broadcast(self, data: Bytes, root: int) -> Pending:
        return _Operation(self.communicator.Ibcast([data, len(data), self._byte], root=root), self, data)

    def add(self, data: Bytes, dtype: str) -> Pending:
        return _Operation(self.communicator.Iallreduce(self._in_place, data.view(dtype)), self, data)


def _starts(counts: Sequence[int]) -> list[int]:
    starts: list[int] = np.cumsum([0, *counts[:-1]]).tolist()
    return starts


class MpiGroups:
    """See ``Groups``. With ``threads_disabled`` the user wants no threads in MPI.

    Raises:
        InitError: the ranks were not started by MPI, or the script has started MPI without support of threads.
    """

    name = "mpi"

    def __init__(self, rank: int, size: int, watch: Watch, threads_disabled: bool = False) -> None:
        if threads_disabled:
            raise InitError(
                "HOROVOD_MPI_THREADS_DISABLE=1 allows MPI in the main thread only, but the engine has its own thread. "
                "Unset it, or choose Gloo with HOROVOD_CPU_OPERATIONS=GLOO"
            )
        mpi4py.rc.thread_level = "multiple"
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            said = (str(error).splitlines() or [""])[0]
            raise InitError(
                f"mpi4py found no MPI library ({said}). Start the job with your MPI's mpirun, and add the folder of "
                "its libmpi.so to LD_LIBRARY_PATH"
            ) from None
        self._mpi: Any = MPI
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        level = MPI.Query_thread()
        if level < MPI.THREAD_SERIALIZED:
            name = "MPI_THREAD_FUNNELED" if level == MPI.THREAD_FUNNELED else "MPI_THREAD_SINGLE"
            raise InitError(
                f"MPI was started by this script with {name}; MPI_THREAD_SERIALIZED is needed. Set "
                "`mpi4py.rc.thread_level = 'multiple'` before `from mpi4py import MPI`, or call hvd.init() first"
            )
        world = MPI.COMM_WORLD
        if (world.Get_rank(), world.Get_size()) != (rank, size):
            raise InitError(
                f"rank {rank} of {size} is rank {world.Get_rank()} of {world.Get_size()} for MPI; they must be equal. "
                "Start the job with mpirun or horovodrun --mpi, or choose Gloo with HOROVOD_CPU_OPERATIONS=GLOO"
            )
        self._rank, self._watch = rank, watch
        # Separate this package's messages from those of the script.
        self._world = world.Dup()
        self._world.Set_errhandler(MPI.ERRORS_RETURN)
        self._groups: dict[tuple[int, ...], _MpiGroup] = {}

    def group(self, ranks: Sequence[int]) -> Group:
        """Return the group of some ranks."""
        key, mpi = tuple(ranks), self._mpi
        found = self._groups.get(key)
        if found is None:
            part = self._world.Get_group().Incl(list(key))
            communicator = self._world.Create_group(part)
            part.Free()
            communicator.Set_errhandler(mpi.ERRORS_RETURN)
            found = _MpiGroup(communicator, key, key.index(self._rank), mpi, self._watch)
            self._groups[key] = found
        return found

    def close(self) -> None:
        """Forget all groups."""
        # Freeing a communicator is collective, and some ranks may be gone: so communicators end with the process.
        self._groups.clear()
