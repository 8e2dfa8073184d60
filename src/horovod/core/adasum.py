"""Compute the weights of Adasum: parallel gradients are averaged, orthogonal ones are added. Pure.

Two vectors are combined as ``(1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b``, several in a binary tree.
The result of any tree is a linear combination of the inputs, so the inner products of the inputs are enough
to find the coefficients.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", arXiv 2006.02924.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

__all__ = ["coefficients"]

#: Below this squared norm a vector counts as zero, and zero has no direction.
_TINY = math.sqrt(sys.float_info.min)

Vector = list[float]


def coefficients(gram: Sequence[Sequence[float]]) -> Vector:
    """Return the weight of each input in the Adasum of all, from their inner products, in float64.

    Neighbours are combined first; where the number is odd, the last one waits for the next level.
    """
    count = len(gram)
    level: list[Vector] = [[1.0 if i == k else 0.0 for i in range(count)] for k in range(count)]
    while len(level) > 1:
        pairs = [_combine(gram, a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + (level[-1:] if len(level) % 2 else [])
    return level[0]


def _combine(gram: Sequence[Sequence[float]], a: Vector, b: Vector) -> Vector:
    dot, a_norm, b_norm = _inner(gram, a, b), _inner(gram, a, a), _inner(gram, b, b)
    a_weight = 1.0 if a_norm < _TINY else 1.0 - dot / (2.0 * a_norm)
    b_weight = 1.0 if b_norm < _TINY else 1.0 - dot / (2.0 * b_norm)
    return [a_weight * x + b_weight * y for x, y in zip(a, b, strict=True)]


def _inner(gram: Sequence[Sequence[float]], a: Vector, b: Vector) -> float:
    return math.fsum(x * y * gram[i][j] for i, x in enumerate(a) if x for j, y in enumerate(b) if y)
