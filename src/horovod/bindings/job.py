"""Functions of Horovod's API that move no tensors: rank and size, timeline, statistics, build information."""

from __future__ import annotations

import os
from pathlib import Path

from horovod import context
from horovod.bindings import process_sets as sets
from horovod.bindings.misuse import without_class_names
from horovod.engine.stats import Stats
from horovod.errors import NotInitializedError
from horovod.world import World

__all__ = ["JobFunctions"]


def _world() -> World:
    sets.was_asked()
    return context.world()


@without_class_names
class JobFunctions:
    """Functions of Horovod's API that are the same for every framework."""

    init = staticmethod(sets.init)
    shutdown = staticmethod(sets.shutdown)

    def is_initialized(self) -> bool:
        """Return whether ``init()`` was called, without a later ``shutdown()``."""
        return context.is_initialized()

    def size(self) -> int:
        """Return the number of ranks."""
        return _world().size

    def rank(self) -> int:
        """Return this process's rank."""
        return _world().rank

    def local_size(self) -> int:
        """Return the number of ranks on this host."""
        return _world().local_size

    def local_rank(self) -> int:
        """Return this process's index among the ranks of its host."""
        return _world().local_rank

    def cross_size(self) -> int:
        """Return the number of hosts that have a rank with this local rank."""
        return _world().cross_size

    def cross_rank(self) -> int:
        """Return this host's index among the hosts that have a rank with this local rank."""
        return _world().cross_rank

    def is_homogeneous(self) -> bool:
        """Return whether all hosts have the same number of ranks."""
        world = _world()
        try:
            hosts = context.engine().link.generation.hosts
        except NotInitializedError:  # in a child of a rank, and in an elastic job whose ranks have not met
            return world.size == world.local_size * world.cross_size
        return len({len(ranks) for ranks in hosts}) == 1

    def start_timeline(self, file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
        """Start to record the operations of all ranks in one file for chrome://tracing and Perfetto.

        Rank 0 must call this; calls of other ranks are harmless. A recording in progress ends.

        Args:
            file_path: the file on rank 0; an existing one is replaced.
            mark_cycles: whether to mark each execution across all rows.

        Raises:
            NotInitializedError: ``init()`` was not called.
            OSError: the file cannot be written.
        """
        context.observer().tracer.start(Path(file_path), mark_cycles)

    def stop_timeline(self) -> None:
        """End the recording that ``start_timeline`` or HOROVOD_TIMELINE started, and complete the file; on rank 0.

        Raises:
            NotInitializedError: ``init()`` was not called.

        Blocks until the other ranks have sent their records, five seconds at most.
        """
        context.observer().tracer.stop()

    def stats(self) -> Stats:
        """Return statistics of this rank since ``init()``, across resets: operations, bytes, waits, fusion.

        Raises:
            NotInitializedError: ``init()`` was not called.
        """
        return context.engine().stats()

    def mpi_threads_supported(self) -> bool:
        """Return False, also where tensors move over MPI.

        Raises:
            NotInitializedError: ``init()`` was not called.
        """
        context.world()
        return False

    def mpi_built(self) -> bool:
        """Return False: nothing was built with MPI; the optional MPI transport uses mpi4py."""
        return False

    def mpi_enabled(self) -> bool:
        """Return False: MPI does not coordinate the ranks, even where tensors move over it."""
        return False

    def gloo_built(self) -> bool:
        """Return True: operations that Horovod runs without MPI work here, through other transports."""
        return True

    def gloo_enabled(self) -> bool:
        """Return True: see ``gloo_built``."""
        return True

    def nccl_built(self) -> int:
        """Return 0: nothing was built with NCCL; ``HOROVOD_GPU_OPERATIONS=NCCL`` uses torch's NCCL."""
        return 0

    def ddl_built(self) -> bool:
        """Return False."""
        return False

    def ccl_built(self) -> bool:
        """Return False."""
        return False

    def cuda_built(self) -> bool:
        """Return False: nothing was built with CUDA; torch handles tensors of a GPU."""
        return False

    def rocm_built(self) -> bool:
        """Return False."""
        return False
