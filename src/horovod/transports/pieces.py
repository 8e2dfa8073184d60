"""Lay tensors end to end, each on a cache line, and find the parts of them in a stretch of the whole. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["LINE", "Piece", "aligned", "pieces_of"]

LINE = 64
"""Bytes of a cache line; a multiple of the size of every dtype."""


class Piece(NamedTuple):
    """A part of one tensor."""

    segment: int  # index of the tensor
    low: int  # its first element
    high: int  # the element behind its last one
    position: int  # its first byte in the stretch


def aligned(nbytes: int) -> int:
    """Return the bytes that a tensor takes up, with its last cache line."""
    return -(-nbytes // LINE) * LINE


def pieces_of(nbytes: Sequence[int], itemsizes: Sequence[int], start: int, stop: int) -> list[Piece]:
    """Cut bytes ``start`` to ``stop`` of the tensors, laid end to end, into pieces of one tensor each."""
    pieces = []
    base = 0
    for segment, (length, itemsize) in enumerate(zip(nbytes, itemsizes, strict=True)):
        low, high = max(start - base, 0), min(stop - base, length)
        if low < high:
            pieces.append(Piece(segment, low // itemsize, high // itemsize, base + low - start))
        base += aligned(length)
        if base >= stop:
            break
    return pieces
