"""The kernels of numpy; bfloat16 comes from ml_dtypes, which TensorFlow and JAX install.

Numpy and ml_dtypes compute with 16-bit floats one by one. They are three to ten times faster after whole blocks are
converted to float32. So these kernels convert blocks that stay in a core's own cache.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod.core.requests import ReduceOp
from horovod.transports.kernels import (
    Copier,
    Kernels,
    Maker,
    Reducer,
    divisor_and_factor,
    followed_by,
    in_blocks,
    pair_by_pair,
)

__all__ = ["NumpyKernels", "numpy_dtype"]

Array = np.ndarray[Any, np.dtype[Any]]

_HALF = ("float16", "bfloat16")
#: The dtypes in which averages are added and divided.
_WIDER: dict[str, Any] = {
    "float32": np.float64,
    "float64": np.longdouble,
    "complex64": np.complex128,
    "complex128": np.clongdouble,
}

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


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a canonical name; load ml_dtypes for bfloat16.

    Raises:
        TypeError: there is no dtype of this name.
    """
    try:
        return np.dtype(name)
    except TypeError:
        if name != "bfloat16":
            raise
    try:
        # The import registers bfloat16 with numpy.
        importlib.import_module("ml_dtypes")
    except ImportError:
        raise TypeError("numpy has no bfloat16 without ml_dtypes; pip install ml_dtypes") from None
    return np.dtype(name)


#: An overflow is a result. Its warning, if the program turns warnings into errors, would end the job.
_silent = np.errstate(all="ignore")


class NumpyKernels(Kernels):
    """See ``Kernels``."""

    name = "numpy"

    def threads(self) -> int:
        return 1

    def set_threads(self, count: int) -> None:
        """Nothing to choose."""

    def view(self, memory: Any, offset: int, dtype: str, shape: tuple[int, ...]) -> Array:
        view: Array = np.ndarray(shape, dtype=numpy_dtype(dtype), buffer=memory, offset=offset)
        return view

    def raw(self, buffer: Array) -> Any:
        return buffer.reshape(-1).view(np.uint8)

    def scratch(self, dtype: str, count: int) -> Array:
        return np.empty(count, dtype=numpy_dtype(dtype))

    def copy(self, dst: Array, src: Array) -> None:
        dst[...] = src

    def clear(self, dst: Array) -> None:
        dst.fill(0)

    def copier(self, dtype: str, factor: float) -> Copier:
        if factor == 1.0:
            return self.copy
        if dtype in _HALF:
            scaled = _silent(in_blocks(_wide_sum(np.float32, factor, 1)))

            def copy_half(dst: Array, src: Array) -> None:
                scaled(dst, (src,))

            return copy_half
        by, multiply = numpy_dtype(dtype).type(factor), _silent(np.multiply)

        def copy(dst: Array, src: Array) -> None:
            multiply(src, by, out=dst)

        return copy

    @functools.lru_cache(maxsize=1024)  # noqa: B019  there is one object of this class, for ever
    def reducer(self, dtype: str, op: ReduceOp, prescale: float, postscale: float, divisor: int) -> Reducer:
        """Return ``fn(dst, srcs)``, see ``Kernels.reducer``."""
        kind = numpy_dtype(dtype)
        if kind == np.bool_:
            return _plain(_BOOL_PAIR[op])
        if op in (ReduceOp.SUM, ReduceOp.AVERAGE) and (dtype in _HALF or kind.kind in "fc"):
            return _silent(_rounding_sum(dtype, prescale, postscale, divisor if op is ReduceOp.AVERAGE else 1))
        if op is ReduceOp.AVERAGE and prescale == postscale == 1.0:
            return in_blocks(_integer_average(kind, divisor))
        if op is ReduceOp.AVERAGE or (op is ReduceOp.SUM and postscale != 1.0):
            by = divisor if op is ReduceOp.AVERAGE else 1
            return _silent(in_blocks(_scaled_integer_sum(prescale, postscale, by)))
        if prescale != 1.0 or postscale != 1.0:
            return _silent(in_blocks(_scaled(_pair(dtype, op), kind, prescale, postscale)))
        plain = _plain(_pair(dtype, op))
        return _silent(in_blocks(plain) if dtype in _HALF else plain)

    def maker(self, dtype: str, op: ReduceOp, prescale: float, postscale: float, divisor: int) -> Maker | None:
        return None

    @_silent
    def gram(self, srcs: Sequence[Array]) -> list[list[float]]:
        matrix = np.stack([src.astype(np.float64) for src in srcs])
        products: list[list[float]] = (matrix @ matrix.T).tolist()
        return products

    @_silent
    def combine(self, dst: Array, srcs: Sequence[Array], weights: Sequence[float]) -> None:
        total = srcs[0].astype(np.float64) * weights[0]
        for src, weight in zip(srcs[1:], weights[1:], strict=True):
            total += src.astype(np.float64) * weight
        # numpy knows no casting rule for a dtype of ml_dtypes.
        np.copyto(dst, total, casting="unsafe")


def _pair(dtype: str, op: ReduceOp) -> Any:
    """Return the function that combines two arrays, called as ``fn(first, second, out=...)``."""
    narrow = _PAIR[op]
    if dtype not in _HALF:
        return narrow

    def pair(first: Array, second: Array, out: Array) -> Array:
        wide = first.astype(np.float32)
        narrow(wide, second.astype(np.float32), out=wide)
        np.copyto(out, wide, casting="unsafe")
        return out

    return pair


def _rounding_sum(dtype: str, prescale: float, postscale: float, divide: int) -> Reducer:
    divide, factor = divisor_and_factor(postscale, divide)
    if dtype in _HALF:
        # Float32 has room for the sum, so one factor at the end replaces both, and rounds less.
        return in_blocks(_wide_sum(np.float32, prescale * factor, divide))
    if divide == 1:
        return _prescaled(followed_by(_plain(np.add), factor, factor), prescale)
    # The average is rounded once, so that equal arrays average to themselves; then it is scaled.
    mean = followed_by(_wide_sum(_WIDER[dtype], 1.0, divide), factor, factor)
    return _prescaled(in_blocks(mean), prescale)


def _plain(pair: Any) -> Reducer:
    return pair_by_pair(pair, np.copyto)


def _wide_sum(wide: Any, factor: float, divide: int) -> Reducer:
    def reduce(dst: Array, srcs: Sequence[Array]) -> None:
        total = srcs[0].astype(wide)
        for src in srcs[1:]:
            # Adding without astype() would convert in pieces that are too small.
            total += src.astype(wide)
        if divide != 1:
            total /= divide
        if factor != 1.0:
            total *= factor
        np.copyto(dst, total, casting="unsafe")

    return reduce


def _prescaled(reducer: Reducer, factor: float) -> Reducer:
    if factor == 1.0:
        return reducer

    def reduce(dst: Array, srcs: Sequence[Array]) -> None:
        reducer(dst, [src * src.dtype.type(factor) for src in srcs])

    return in_blocks(reduce)


def _integer_average(kind: np.dtype[Any], divisor: int) -> Reducer:
    # A divisor may not fit into eight bits.
    wide = np.promote_types(kind, np.int32) if kind.itemsize < 4 else kind
    by = wide.type(divisor)

    def reduce(dst: Array, srcs: Sequence[Array]) -> None:
        # Quotients and remainders are added apart: the sum of the values may be out of range.
        quotients, remainders = np.zeros(dst.shape, wide), np.zeros(dst.shape, wide)
        for src in srcs:
            quotient, remainder = np.divmod(src.astype(wide, copy=False), by)
            quotients += quotient
            remainders += remainder
        carry, remainder = np.divmod(remainders, by)
        quotients += carry
        # Truncate toward zero, as Horovod does: numpy rounds down.
        quotients += (quotients < 0) & (remainder != 0)
        np.copyto(dst, quotients, casting="unsafe")

    return reduce


def _scaled_integer_sum(prescale: float, postscale: float, divide: int) -> Reducer:
    def reduce(dst: Array, srcs: Sequence[Array]) -> None:
        total = np.zeros(dst.shape, np.float64)
        for src in srcs:
            total += np.trunc(src * np.float64(prescale))
        total *= postscale
        total /= divide
        np.copyto(dst, np.trunc(total), casting="unsafe")

    return reduce


def _scaled(pair: Any, kind: np.dtype[Any], prescale: float, postscale: float) -> Reducer:
    # torch, too, multiplies half precision in float32.
    wide = np.dtype(np.float64 if kind.kind in "iu" else np.float32 if kind.name in _HALF else kind)

    def scale(value: Array, factor: float) -> Array:
        if factor == 1.0:
            return value
        product = value.astype(wide) * wide.type(factor)
        scaled: Array = (np.trunc(product) if kind.kind in "iu" else product).astype(kind)
        return scaled

    def reduce(dst: Array, srcs: Sequence[Array]) -> None:
        total = scale(srcs[0], prescale)
        for src in srcs[1:]:
            total = pair(total, scale(src, prescale), out=np.empty_like(total))
        np.copyto(dst, scale(total, postscale))

    return reduce
