"""Horovod's API for numpy arrays: ``import horovod.numpy as hvd``."""

from horovod.bindings import common_names
from horovod.bindings.common_names import *  # noqa: F403 - all of it, by its own list
from horovod.bindings.objects import allgather_object, broadcast_object
from horovod.bindings.runtime import comm
from horovod.numpy import elastic

allreduce = comm.allreduce
allreduce_ = comm.allreduce_
allreduce_async = comm.allreduce_async
allreduce_async_ = comm.allreduce_async_
grouped_allreduce = comm.grouped_allreduce
grouped_allreduce_ = comm.grouped_allreduce_
grouped_allreduce_async = comm.grouped_allreduce_async
grouped_allreduce_async_ = comm.grouped_allreduce_async_
allgather = comm.allgather
allgather_async = comm.allgather_async
grouped_allgather = comm.grouped_allgather
grouped_allgather_async = comm.grouped_allgather_async
broadcast = comm.broadcast
broadcast_ = comm.broadcast_
broadcast_async = comm.broadcast_async
broadcast_async_ = comm.broadcast_async_
alltoall = comm.alltoall
alltoall_async = comm.alltoall_async
reducescatter = comm.reducescatter
reducescatter_async = comm.reducescatter_async
grouped_reducescatter = comm.grouped_reducescatter
grouped_reducescatter_async = comm.grouped_reducescatter_async
barrier = comm.barrier
join = comm.join
poll = comm.poll
synchronize = comm.synchronize
zeros = comm.zeros
empty = comm.empty

__all__ = [
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
    "elastic",
    "empty",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
    "zeros",
]
__all__ += common_names.__all__
