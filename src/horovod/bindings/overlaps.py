"""Tensors of one group in place that share memory: tied weights, views of one another. Pure."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["find_overlaps"]


def find_overlaps(places: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Return which places must move away so that no two share a byte, each with one that stays and is in its way.

    Args:
        places: first byte and number of bytes of each.
    """
    moved: dict[int, int] = {}
    end = owner = -1
    for start, index in sorted((start, index) for index, (start, nbytes) in enumerate(places) if nbytes):
        if start < end:
            moved[index] = owner
        else:
            end, owner = start + places[index][1], index
    return moved
