"""Vectorised copy and reduction kernels, borrowed from a library that is already loaded.

A *buffer* here is a one-dimensional, contiguous array over host memory: a ``torch.Tensor`` or a
``numpy.ndarray``. ``libraries.kernels_named`` gives the implementation; both offer the same methods, so the
transports never ask which one they hold.

Reductions accumulate 16-bit floats in float32 and round once at the end: exact for two ranks, and for
more ranks closer than any order of 16-bit additions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from horovod.core.requests import ReduceOp

__all__ = ["Buffer", "Kernels", "Reducer"]

Buffer = Any
Reducer = Callable[[Buffer, Sequence[Buffer]], None]


class Kernels(Protocol):
    """What a transport needs from an array library."""

    name: str

    def view(self, memory: Any, offset: int, dtype: str, shape: tuple[int, ...]) -> Buffer:
        """Return an array of ``shape`` over ``memory`` at byte ``offset``; no copy."""

    def scratch(self, dtype: str, count: int) -> Buffer:
        """Return an uninitialised private 1-D array."""

    def copy(self, dst: Buffer, src: Buffer) -> None:
        """Copy ``src`` over ``dst``; same dtype and shape."""

    def reducer(self, dtype: str, op: ReduceOp, prescale: float, postscale: float, divisor: int) -> Reducer:
        """Return ``fn(dst, srcs)``: dst = postscale * op(prescale * srcs) / divisor.

        ``dst`` may be one of the first two ``srcs``, and no other. The order of ``srcs`` fixes the bits.
        """

    def gram(self, srcs: Sequence[Buffer]) -> list[list[float]]:
        """Return the inner product of every two ``srcs``, in float64."""

    def combine(self, dst: Buffer, srcs: Sequence[Buffer], weights: Sequence[float]) -> None:
        """Write the weighted sum of ``srcs``, taken in float64, to ``dst``."""
