"""All collectives and queries of rank and size in one module; also the import path that Horovod's scripts use."""

from __future__ import annotations

from typing import Any

from horovod.bindings import common_names
from horovod.bindings.basics import HorovodBasics
from horovod.bindings.common_names import *  # noqa: F403 - all of it, by its own list
from horovod.tensorflow import collectives, ops
from horovod.tensorflow.ops import *  # noqa: F403 - all of it, by its own list

_basics = HorovodBasics()

__all__ = [
    "check_num_rank_power_of_2",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "size_op",
]
__all__ += ops.__all__
__all__ += common_names.__all__


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of two; Horovod's Adasum required it, ours does not.

    Args:
        num_rank: the number.
    """
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks, evaluated when the graph runs.

    Args:
        process_set_id: id of the process set; 0 is the set of all ranks.
        name: name of the node.
    """
    return collectives.query("HorovodSize", process_set_id, name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 if this rank is a member of a set, 0 if not, -3 if the set does not exist, when the graph runs.

    Args:
        process_set_id: id of the process set.
        name: name of the node.
    """
    return collectives.query("HorovodProcessSetIncluded", process_set_id, name)


def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks on this host, evaluated when the graph runs.

    Args:
        name: name of the node.
    """
    return collectives.query("HorovodLocalSize", 0, name)


def rank_op(name: str | None = None) -> Any:
    """Return this process's rank, evaluated when the graph runs.

    Args:
        name: name of the node.
    """
    return collectives.query("HorovodRank", 0, name)


def local_rank_op(name: str | None = None) -> Any:
    """Return this process's index among the ranks of its host, evaluated when the graph runs.

    Args:
        name: name of the node.
    """
    return collectives.query("HorovodLocalRank", 0, name)
