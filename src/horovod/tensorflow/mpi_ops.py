"""All collectives and queries of rank and size in one module; also the import path that Horovod's scripts use."""

from __future__ import annotations

from horovod.bindings import common_names
from horovod.bindings.basics import HorovodBasics
from horovod.bindings.common_names import *  # noqa: F403 - all of it, by its own list
from horovod.tensorflow.ops import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
)
from horovod.tensorflow.queries import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op

_basics = HorovodBasics()


__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "check_num_rank_power_of_2",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
__all__ += common_names.__all__


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of two; Horovod's Adasum required it, ours does not.

    Args:
        num_rank: the number.
    """
    return num_rank > 0 and num_rank & (num_rank - 1) == 0
