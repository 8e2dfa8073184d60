"""Vectorised copy and reduction kernels, borrowed from a library that is already loaded.

A *buffer* here is a contiguous array over host memory: a ``torch.Tensor`` or a
``numpy.ndarray``. ``libraries.kernels_named`` gives the implementation; both offer the same methods, so the
transports never ask which one they hold.

Reductions accumulate 16-bit floats in float32 and round once at the end: exact for two ranks, and for
more ranks closer than any order of 16-bit additions. Averages by a divisor that is not a power of two add and divide in
the next wider type and round once, so that equal tensors average to themselves; a sum in the tensor's own type has
already lost the necessary bit. Averages of integers do not overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from horovod.core.requests import ReduceOp

__all__ = [
    "BLOCK", "Buffer", "Copier", "Kernels", "Maker", "Reducer", "divisor_and_factor", "followed_by", "in_blocks",
    "pair_by_pair", "scale_on_entry",
]  # fmt: skip

Buffer = Any
Copier = Callable[[Buffer, Buffer], object]
Reducer = Callable[[Buffer, Sequence[Buffer]], None]
Maker = Callable[[Sequence[Buffer]], Buffer]

#: Elements of a block; a few arrays of this size fit into a core's own cache.
BLOCK = 32 << 10
_SCALED_ON_ENTRY = frozenset({"float32", "float64", "bfloat16", "complex64", "complex128"})
#: With a smaller factor, small values would lose bits that their sum would have kept.
_LEAST_FACTOR = 2.0**-16


def scale_on_entry(dtype: str, op: ReduceOp, prescale: float, postscale: float, divisor: int) -> float:
    """Return the factor for each rank's own data that leaves a plain sum; 1 if it would change the rounding.

    A power of two commutes with every rounding, so the copy that is made anyway can scale, too. Results differ only at
    the ends of the range: the sum does not overflow, but subnormal numbers lose a bit earlier.
    """
    if dtype not in _SCALED_ON_ENTRY or op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        return 1.0
    by = divisor if op is ReduceOp.AVERAGE else 1
    if any(math.frexp(one)[0] != 0.5 for one in (prescale, postscale, by)):
        return 1.0
    factor = prescale * postscale / by
    return factor if _LEAST_FACTOR <= factor < 1.0 else 1.0


def divisor_and_factor(postscale: float, divide: int) -> tuple[int, float]:
    """Return the divisor and the factor of a sum; a power of two is a factor, which rounds nothing."""
    return (1, postscale / divide) if divide & (divide - 1) == 0 else (divide, postscale)


def pair_by_pair(pair: Any, copy: Copier) -> Reducer:
    """Return a reducer that combines arrays by ``pair(first, second, out=...)``, in their order."""

    def reduce(dst: Buffer, srcs: Sequence[Buffer]) -> None:
        if len(srcs) == 1:
            copy(dst, srcs[0])
            return
        pair(srcs[0], srcs[1], out=dst)
        for src in srcs[2:]:
            pair(dst, src, out=dst)

    return reduce


def followed_by(reducer: Reducer, factor: float, times: Any) -> Reducer:
    """Return a reducer whose result is multiplied by ``times``, which is ``factor`` in the library's form."""
    if factor == 1.0:
        return reducer

    def reduce(dst: Buffer, srcs: Sequence[Buffer]) -> None:
        reducer(dst, srcs)
        dst *= times

    return reduce


def in_blocks(reducer: Reducer) -> Reducer:
    """Return a reducer that works in blocks, so that its temporary arrays stay in a core's own cache."""

    def reduce(dst: Buffer, srcs: Sequence[Buffer]) -> None:
        count = math.prod(dst.shape)
        if count <= BLOCK:
            reducer(dst, srcs)
            return
        dst, srcs = dst.reshape(-1), [src.reshape(-1) for src in srcs]
        for start in range(0, count, BLOCK):
            part = slice(start, start + BLOCK)
            reducer(dst[part], [src[part] for src in srcs])

    return reduce


class Kernels(Protocol):
    """The functions that a transport needs from an array library."""

    name: str

    def threads(self) -> int:
        """Return how many threads the calling thread's operations on large arrays use."""

    def set_threads(self, count: int) -> None:
        """Set that number, for the calling thread alone."""

    def view(self, memory: Any, offset: int, dtype: str, shape: tuple[int, ...]) -> Buffer:
        """Return an array of ``shape`` over ``memory`` at byte ``offset``; no copy."""

    def raw(self, buffer: Buffer) -> Any:
        """Return the bytes of ``buffer`` as a one-dimensional numpy array; no copy."""

    def scratch(self, dtype: str, count: int) -> Buffer:
        """Return an uninitialised private 1-D array."""

    def copy(self, dst: Buffer, src: Buffer) -> None:
        """Copy ``src`` over ``dst``; same dtype and shape."""

    def clear(self, dst: Buffer) -> None:
        """Fill ``dst`` with zeros."""

    def copier(self, dtype: str, factor: float) -> Copier:
        """Return ``fn(dst, src)``: dst = factor * src."""

    def reducer(self, dtype: str, op: ReduceOp, prescale: float, postscale: float, divisor: int) -> Reducer:
        """Return ``fn(dst, srcs)``: dst = postscale * op(prescale * srcs) / divisor.

        ``dst`` may be one of the first two ``srcs``, and no other. The order of ``srcs`` fixes the bits.
        """

    def maker(self, dtype: str, op: ReduceOp, prescale: float, postscale: float, divisor: int) -> Maker | None:
        """Return ``fn(srcs)``, which makes the result of ``reducer`` for at least two ``srcs``.

        None if that is not cheaper than writing to an empty array.
        """

    def gram(self, srcs: Sequence[Buffer]) -> list[list[float]]:
        """Return the inner product of every two ``srcs``, in float64."""

    def combine(self, dst: Buffer, srcs: Sequence[Buffer], weights: Sequence[float]) -> None:
        """Write the weighted sum of ``srcs``, taken in float64, to ``dst``."""
