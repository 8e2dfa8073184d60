"""Rank and size as operations of a graph, evaluated when it runs."""

from __future__ import annotations

from typing import Any

from horovod.tensorflow import collectives

__all__ = ["local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op"]


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks, found out when the graph runs.

    Args:
        process_set_id: of the process set; 0 is that of all ranks.
        name: of the node.
    """
    return collectives.query("HorovodSize", process_set_id, name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 if this rank is a member of a process set, 0 if not, -3 if there is no such set, when the graph runs.

    Args:
        process_set_id: of the process set.
        name: of the node.
    """
    return collectives.query("HorovodProcessSetIncluded", process_set_id, name)


def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks on this host, found out when the graph runs.

    Args:
        name: of the node.
    """
    return collectives.query("HorovodLocalSize", 0, name)


def rank_op(name: str | None = None) -> Any:
    """Return the number of this rank, found out when the graph runs.

    Args:
        name: of the node.
    """
    return collectives.query("HorovodRank", 0, name)


def local_rank_op(name: str | None = None) -> Any:
    """Return the number of this rank among those of its host, found out when the graph runs.

    Args:
        name: of the node.
    """
    return collectives.query("HorovodLocalRank", 0, name)
