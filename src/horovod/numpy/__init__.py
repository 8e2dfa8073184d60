"""Horovod's API for numpy arrays: ``import horovod.numpy as hvd``."""

from __future__ import annotations

from horovod.bindings.collectives import Collectives
from horovod.bindings.numpy_adapter import NumpyAdapter
from horovod.bindings.objects import allgather_object, broadcast_object
from horovod.bindings.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from horovod.bindings.reductions import Adasum, Average, Max, Min, Product, Sum
from horovod.errors import HorovodInternalError

_collectives = Collectives(NumpyAdapter())

init = _collectives.init
shutdown = _collectives.shutdown
is_initialized = _collectives.is_initialized
size = _collectives.size
rank = _collectives.rank
local_size = _collectives.local_size
local_rank = _collectives.local_rank
cross_size = _collectives.cross_size
cross_rank = _collectives.cross_rank
is_homogeneous = _collectives.is_homogeneous
start_timeline = _collectives.start_timeline
stop_timeline = _collectives.stop_timeline
stats = _collectives.stats
allreduce = _collectives.allreduce
allreduce_ = _collectives.allreduce_
allreduce_async = _collectives.allreduce_async
allreduce_async_ = _collectives.allreduce_async_
grouped_allreduce = _collectives.grouped_allreduce
grouped_allreduce_ = _collectives.grouped_allreduce_
grouped_allreduce_async = _collectives.grouped_allreduce_async
grouped_allreduce_async_ = _collectives.grouped_allreduce_async_
allgather = _collectives.allgather
allgather_async = _collectives.allgather_async
grouped_allgather = _collectives.grouped_allgather
grouped_allgather_async = _collectives.grouped_allgather_async
broadcast = _collectives.broadcast
broadcast_ = _collectives.broadcast_
broadcast_async = _collectives.broadcast_async
broadcast_async_ = _collectives.broadcast_async_
alltoall = _collectives.alltoall
alltoall_async = _collectives.alltoall_async
reducescatter = _collectives.reducescatter
reducescatter_async = _collectives.reducescatter_async
grouped_reducescatter = _collectives.grouped_reducescatter
grouped_reducescatter_async = _collectives.grouped_reducescatter_async
barrier = _collectives.barrier
join = _collectives.join
poll = _collectives.poll
synchronize = _collectives.synchronize
zeros = _collectives.zeros
empty = _collectives.empty

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "cross_rank",
    "cross_size",
    "empty",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "shutdown",
    "size",
    "start_timeline",
    "stats",
    "stop_timeline",
    "synchronize",
    "zeros",
]
