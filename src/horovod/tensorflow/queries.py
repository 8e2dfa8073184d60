"""Rank and size as graph operations, evaluated when the graph runs."""

from __future__ import annotations

from typing import Any

from horovod.tensorflow import collectives

__all__ = ["local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op"]


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
