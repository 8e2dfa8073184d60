"""Find tensors of an in-place group that share memory: tied weights, views of each other. Pure."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["find_overlaps"]


def find_overlaps(places: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Return the indices of tensors to copy so that no two share a byte, each with the index of a kept rival.

    Args:
        places: address and number of bytes of each tensor.
    """
    moved: dict[int, int] = {}
    end = owner = -1
    for start, index in sorted((start, index) for index, (start, nbytes) in enumerate(places) if nbytes):
        if start < end:
            moved[index] = owner
        else:
            end, owner = start + places[index][1], index
    return moved
