"""Horovod's API for PopART: ``import horovod.popart as hvd``.

It uses the methods of PopART's sessions, and imports neither PopART nor a framework: it works with the script's own
``popart``, the vendor's or the software one (khorovod-ipu).
"""

from __future__ import annotations

from horovod.bindings.common_names import (
    HorovodInternalError,
    cross_rank,
    cross_size,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    rank,
    shutdown,
    size,
    start_timeline,
    stats,
    stop_timeline,
)
from horovod.bindings.objects import allgather_object, broadcast_object
from horovod.popart.optimizer import DistributedOptimizer
from horovod.popart.sessions import DistributedTrainingSession
from horovod.popart.weights import broadcast_weights

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
