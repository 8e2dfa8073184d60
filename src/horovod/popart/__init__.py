"""Horovod's API for PopART: ``import horovod.popart as hvd``.

It speaks to a session by what PopART's sessions offer, and imports neither PopART nor a framework: whichever ``popart``
the script has imported, the vendor's or the one in software (khorovod-ipu), is the one that it works with.
"""

from __future__ import annotations

from horovod.bindings.objects import allgather_object, broadcast_object
from horovod.errors import HorovodInternalError
from horovod.popart.optimizer import DistributedOptimizer
from horovod.popart.runtime import comm
from horovod.popart.sessions import DistributedTrainingSession
from horovod.popart.weights import broadcast_weights

init = comm.init
shutdown = comm.shutdown
is_initialized = comm.is_initialized
size = comm.size
rank = comm.rank
local_size = comm.local_size
local_rank = comm.local_rank
cross_size = comm.cross_size
cross_rank = comm.cross_rank
is_homogeneous = comm.is_homogeneous
mpi_threads_supported = comm.mpi_threads_supported
mpi_built = comm.mpi_built
mpi_enabled = comm.mpi_enabled
gloo_built = comm.gloo_built
gloo_enabled = comm.gloo_enabled
start_timeline = comm.start_timeline
stop_timeline = comm.stop_timeline
stats = comm.stats

__all__ = [
    "DistributedOptimizer",
    "DistributedTrainingSession",
    "HorovodInternalError",
    "allgather_object",
    "broadcast_object",
    "broadcast_weights",
    "cross_rank",
    "cross_size",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "rank",
    "shutdown",
    "size",
    "start_timeline",
    "stats",
    "stop_timeline",
]
