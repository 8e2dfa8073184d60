"""The kernels of numpy."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod.core.requests import ReduceOp
from horovod.transports.kernels import Copier, Reducer

__all__ = ["NumpyKernels"]

Array = np.ndarray[Any, np.dtype[Any]]

_PAIR: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVERAGE: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}
_BOOL_PAIR: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.logical_or,
    ReduceOp.MAX: np.logical_or,
    ReduceOp.MIN: np.logical_and,
    ReduceOp.PRODUCT: np.logical_and,
}


#: An overflow is a result. As a warning, which a program may have turned into an error, it would end the job.
_silent = np.errstate(all="ignore")


class NumpyKernels:
    """See ``Kernels``."""

    name = "numpy"

    def threads(self) -> int:
        """Return 1: element by element, numpy stays in the calling thread."""
        return 1

    def set_threads(self, count: int) -> None:
        """Nothing to choose."""

    def view(self, memory: Any, offset: int, dtype: str, shape: tuple[int, ...]) -> Array:
        """Return an array of ``shape`` over ``memory`` at byte ``offset``; no copy."""
        view: Array = np.ndarray(shape, dtype=dtype, buffer=memory, offset=offset)
        return view

    def scratch(self, dtype: str, count: int) -> Array:
        """Return an uninitialised private 1-D array."""
        return np.empty(count, dtype=dtype)

    def copy(self, dst: Array, src: Array) -> None:
        """Copy ``src`` over ``dst``."""
        np.copyto(dst, src)

    def clear(self, dst: Array) -> None:
        """Fill ``dst`` with zeros."""
        dst.fill(0)

    @functools.lru_cache(maxsize=1024)  # noqa: B019  there is one object of this class, for ever
    def copier(self, dtype: str, factor: float) -> Copier:
        """Return ``fn(dst, src)``, see ``Kernels.copier``."""
        if factor == 1.0:
            return self.copy
        by = np.dtype(dtype).type(factor)

        @_silent
        def copy(dst: Array, src: Array) -> None:
            np.multiply(src, by, out=dst)

        return copy

    @functools.lru_cache(maxsize=1024)  # noqa: B019  as above
    def reducer(self, dtype: str, op: ReduceOp, prescale: float, postscale: float, divisor: int) -> Reducer:
        """Return ``fn(dst, srcs)``, see ``Kernels.reducer``."""
        kind = np.dtype(dtype)
        if kind == np.bool_:
            return _plain(_BOOL_PAIR[op])
        if kind.kind in "fc" or prescale != 1.0 or postscale != 1.0:
            return _silent(self._rounding_reducer(kind, op, prescale, postscale, divisor))
        return _integer_average(divisor) if op is ReduceOp.AVERAGE else _plain(_PAIR[op])

    def _rounding_reducer(
        self, kind: np.dtype[Any], op: ReduceOp, prescale: float, postscale: float, divisor: int
    ) -> Reducer:
        if kind.kind in "fc" and op in (ReduceOp.SUM, ReduceOp.AVERAGE):
            factor, divide = postscale, divisor if op is ReduceOp.AVERAGE else 1
            if divide & (divide - 1) == 0:
                factor, divide = factor / divide, 1
            if kind == np.float16:
                # Float32 has room for the sum, so that one factor at the end does for both, and rounds less.
                return _float_sum(prescale * factor, divide, half=True)
            return _prescaled(_float_sum(factor, divide, half=False), prescale)
        if prescale == 1.0 and postscale == 1.0 and op is not ReduceOp.AVERAGE:
            return _plain(_PAIR[op])
        return _scaled(_PAIR[op], prescale, postscale / divisor if op is ReduceOp.AVERAGE else postscale)

    @_silent
    def gram(self, srcs: Sequence[Array]) -> list[list[float]]:
        """Return the inner product of every two ``srcs``, in float64."""
        matrix = np.stack([src.astype(np.float64) for src in srcs])
        products: list[list[float]] = (matrix @ matrix.T).tolist()
        return products

    @_silent
    def combine(self, dst: Array, srcs: Sequence[Array], weights: Sequence[float]) -> None:
        """Write the weighted sum of ``srcs``, taken in float64, to ``dst``."""
        total = srcs[0].astype(np.float64) * weights[0]
        for src, weight in zip(srcs[1:], weights[1:], strict=True):
            total += src.astype(np.float64) * weight
        np.copyto(dst, total, casting="same_kind")


def _plain(pair: Any) -> Reducer:
    def reduce(dst: Array, srcs: Sequence[Array]) -> None:
        if len(srcs) == 1:
            np.copyto(dst, srcs[0])
            return
        pair(srcs[0], srcs[1], out=dst)
        for src in srcs[2:]:
            pair(dst, src, out=dst)

    return reduce


def _float_sum(factor: float, divide: int, *, half: bool) -> Reducer:
    plain = _plain(np.add)

    def reduce(dst: Array, srcs: Sequence[Array]) -> None:
        if half:
            total = srcs[0].astype(np.float32)
            for src in srcs[1:]:
                total += src
        else:
            plain(dst, srcs)
            total = dst
        if divide != 1:
            total /= divide
        if factor != 1.0:
            total *= factor
        if half:
            dst[...] = total

    return reduce


def _prescaled(reducer: Reducer, factor: float) -> Reducer:
    if factor == 1.0:
        return reducer

    def reduce(dst: Array, srcs: Sequence[Array]) -> None:
        reducer(dst, [src * src.dtype.type(factor) for src in srcs])

    return reduce


def _integer_average(divisor: int) -> Reducer:
    total = _plain(np.add)

    def reduce(dst: Array, srcs: Sequence[Array]) -> None:
        total(dst, srcs)
        # Truncation toward zero, as Horovod's: numpy's // rounds down, so correct negative remainders.
        quotient = dst // dst.dtype.type(divisor)
        quotient += (dst < 0) & (quotient * dst.dtype.type(divisor) != dst)
        np.copyto(dst, quotient)

    return reduce


def _scaled(pair: Any, prescale: float, postscale: float) -> Reducer:
    def scale(value: Array, factor: float) -> Array:
        if factor == 1.0:
            return value
        if value.dtype.kind == "c":
            return value * factor
        wide = value.astype(np.float64) * factor
        return (wide if value.dtype.kind == "f" else np.trunc(wide)).astype(value.dtype)

    def reduce(dst: Array, srcs: Sequence[Array]) -> None:
        total = scale(srcs[0], prescale)
        for src in srcs[1:]:
            total = pair(total, scale(src, prescale))
        np.copyto(dst, scale(total, postscale))

    return reduce
