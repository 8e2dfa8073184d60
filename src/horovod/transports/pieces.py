"""Tensors laid end to end, each on a cache line, and what of them lies in a stretch of the whole. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["LINE", "Piece", "aligned", "pieces_of"]

LINE = 64
"""Bytes of a cache line; every dtype fits into it without a rest."""


class Piece(NamedTuple):
    """A part of one tensor.

    Attributes:
        segment: which.
        low: its first element.
        high: the one behind its last.
        position: byte at which it lies, in the stretch.
    """

    segment: int
    low: int
    high: int
    position: int


def aligned(nbytes: int) -> int:
    """Return how much room a tensor takes."""
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
