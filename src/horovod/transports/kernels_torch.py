"""The kernels of PyTorch, on host memory; they name the CPU, since a script may have set another default device."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod.core.requests import ITEMSIZE, ReduceOp
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
from horovod.transports.kernels_numpy import NumpyKernels

__all__ = ["DTYPES", "TorchKernels", "as_bytes"]

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE}
_HALF = (torch.float16, torch.bfloat16)
#: The dtypes in which averages are added and divided; for other dtypes numpy has a wider one.
_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
#: How many factors and divisors are kept as tensors.
_MOST_CONSTANTS = 64
_constants: dict[tuple[float, torch.dtype], torch.Tensor] = {}
_is_inferring = torch.is_inference_mode_enabled
# Torch has these dtypes, but no arithmetic for them.
_NOT_IN_TORCH = ("uint16", "uint32", "uint64")
_PAIR: dict[ReduceOp, Any] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVERAGE: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}
_BOOL_PAIR: dict[ReduceOp, Any] = {
    ReduceOp.SUM: torch.logical_or,
    ReduceOp.MAX: torch.logical_or,
    ReduceOp.MIN: torch.logical_and,
    ReduceOp.PRODUCT: torch.logical_and,
}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as bytes; torch counts one element as contiguous, whatever its stride."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _openmp() -> Callable[[int], None] | None:
    """Return the thread count setter of the OpenMP library that torch uses; None if torch is built without OpenMP.

    ``torch.set_num_threads`` would also affect threads that start later.
    """
    try:
        setter = ctypes.PyDLL(torch._C.__file__).omp_set_num_threads
    except (AttributeError, OSError):
        return None
    setter.argtypes, setter.restype = (ctypes.c_int,), None
    return setter


class TorchKernels(Kernels):
    """See ``Kernels``."""

    name = "torch"

    def __init__(self) -> None:
        self._set_threads = _openmp()

    def threads(self) -> int:
        return torch.get_num_threads() if self._set_threads is not None else 1

    def set_threads(self, count: int) -> None:
        if self._set_threads is not None:
            self._set_threads(count)

    def view(self, memory: Any, offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        if torch.is_inference_mode_enabled():
            # The view may be written to later, outside inference mode; torch forbids that for tensors made inside it.
            with torch.inference_mode(False):
                return self.view(memory, offset, dtype, shape)
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=DTYPES[dtype], device="cpu")
        return torch.frombuffer(memory, dtype=DTYPES[dtype], count=count, offset=offset).view(shape)

    def raw(self, buffer: torch.Tensor) -> Any:
        return as_bytes(buffer.detach()).numpy()

    def scratch(self, dtype: str, count: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(count, dtype=DTYPES[dtype], device="cpu")

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src)

    def clear(self, dst: torch.Tensor) -> None:
        dst.zero_()

    @functools.lru_cache(maxsize=1024)  # noqa: B019  there is one object of this class, for ever
    def copier(self, dtype: str, factor: float) -> Copier:
        """Return ``fn(dst, src)``, see ``Kernels.copier``."""
        if factor == 1.0:
            return torch.Tensor.copy_
        by, mul = _constant(factor, DTYPES[dtype]), torch.mul

        def copy(dst: torch.Tensor, src: torch.Tensor) -> None:
            mul(src, by, out=dst)

        return copy

    @functools.lru_cache(maxsize=1024)  # noqa: B019  as above
    def reducer(self, dtype: str, op: ReduceOp, prescale: float, postscale: float, divisor: int) -> Reducer:
        """Return ``fn(dst, srcs)``, see ``Kernels.reducer``."""
        kind = DTYPES[dtype]
        if kind is torch.bool:
            return _plain(_BOOL_PAIR[op])
        floating = kind.is_floating_point or kind.is_complex
        is_plain = op is not ReduceOp.AVERAGE and prescale == postscale == 1.0
        if dtype in _NOT_IN_TORCH or not (floating or is_plain):
            return _through_numpy(NumpyKernels().reducer(dtype, op, prescale, postscale, divisor))
        if floating and op in (ReduceOp.SUM, ReduceOp.AVERAGE):
            divide, factor = divisor_and_factor(postscale, divisor if op is ReduceOp.AVERAGE else 1)
            if kind in _HALF:
                # Float32 has room for the sum, so one factor at the end replaces both, and rounds less.
                return _half_sum(kind, prescale * factor, divide)
            if divide == 1:
                return _prescaled(followed_by(_plain(torch.add), factor, _constant(factor, kind)), prescale)
            if kind not in _WIDER:
                return _through_numpy(NumpyKernels().reducer(dtype, op, prescale, postscale, divisor))
            # The average is rounded once, so that equal tensors average to themselves; then it is scaled.
            mean = followed_by(_wide_sum(_WIDER[kind], 1.0, divide), factor, _constant(factor, kind))
            return _prescaled(in_blocks(mean), prescale)
        return _plain(_PAIR[op]) if is_plain else _scaled(_PAIR[op], prescale, postscale)

    def maker(self, dtype: str, op: ReduceOp, prescale: float, postscale: float, divisor: int) -> Maker | None:
        kind = DTYPES[dtype]
        divide, factor = divisor_and_factor(postscale, divisor if op is ReduceOp.AVERAGE else 1)
        if prescale != 1.0 or divide != 1 or not kind.is_floating_point or kind in _HALF:
            return None
        return _new(_PAIR[op], factor, _constant(factor, kind))

    def gram(self, srcs: Sequence[torch.Tensor]) -> list[list[float]]:
        matrix = torch.stack([src.to(torch.float64) for src in srcs])
        products: list[list[float]] = (matrix @ matrix.T).tolist()
        return products

    def combine(self, dst: torch.Tensor, srcs: Sequence[torch.Tensor], weights: Sequence[float]) -> None:
        total = srcs[0].to(torch.float64) * weights[0]
        for src, weight in zip(srcs[1:], weights[1:], strict=True):
            total.add_(src, alpha=weight)
        dst.copy_(total)


def _constant(value: float, kind: torch.dtype) -> Any:
    """Return a factor or divisor that ``kind`` represents exactly, as a tensor or as a number.

    The first ones are tensors: wrapping a Python number, or converting another dtype, costs more than the arithmetic on
    a small tensor. The later ones are numbers: if factors never repeat, more and more of these tensors would keep the C
    library from reusing the memory of large tensors around them.
    """
    constant = _constants.get((value, kind))
    if constant is None:
        constant = torch.tensor(value, dtype=kind, device="cpu")
        if len(_constants) >= _MOST_CONSTANTS:
            return constant.item()
        _constants[value, kind] = constant
    return constant


def _plain(pair: Any) -> Reducer:
    return pair_by_pair(pair, torch.Tensor.copy_)


def _new(pair: Any, factor: float, times: Any) -> Maker:
    plain, kind = _plain(pair), torch.Tensor

    def make(srcs: Sequence[torch.Tensor]) -> torch.Tensor:
        first, second = srcs[0], srcs[1]
        if type(first) is kind is type(second) and not _is_inferring():
            # Making an empty tensor first would take twice as long.
            total: torch.Tensor = pair(first, second)
            if len(srcs) > 2:
                for src in srcs[2:]:
                    pair(total, src, out=total)
        else:
            with torch.inference_mode(False):
                total = torch.empty(first.shape, dtype=first.dtype, device="cpu")
            plain(total, srcs)
        if factor != 1.0:
            total *= times
        return total

    return make


def _through_numpy(reducer: Reducer) -> Reducer:
    def reduce(dst: torch.Tensor, srcs: Sequence[torch.Tensor]) -> None:
        reducer(dst.numpy(), [src.numpy() for src in srcs])

    return reduce


def _prescaled(reducer: Reducer, factor: float) -> Reducer:
    if factor == 1.0:
        return reducer
    times = _constant(factor, torch.float64)

    def reduce(dst: torch.Tensor, srcs: Sequence[torch.Tensor]) -> None:
        if not dst.dim():
            # A tensor without dimensions would become float64, unless the factor is a number.
            dst, srcs = dst.view(1), [src.view(1) for src in srcs]
        reducer(dst, [src * times for src in srcs])

    return in_blocks(reduce)


def _half_sum(kind: torch.dtype, factor: float, divide: int) -> Reducer:
    wide = in_blocks(_wide_sum(torch.float32, factor, divide))
    power_of_two = divide == 1 and math.frexp(factor)[0] == 0.5
    if factor == 1.0 and divide == 1:
        pair = _plain(torch.add)
    elif power_of_two and kind is torch.bfloat16:
        pair = followed_by(_plain(torch.add), factor, _constant(factor, kind))
    elif factor == 0.5 and divide == 1:
        pair = _half_pair_mean()
    else:
        return wide

    def reduce(dst: torch.Tensor, srcs: Sequence[torch.Tensor]) -> None:
        if len(srcs) == 2:
            pair(dst, srcs)
        else:
            wide(dst, srcs)

    return reduce


def _half_pair_mean() -> Reducer:
    """Return a reducer that averages two float16, rounded once: torch interpolates in float32."""
    wide, lerp = _wide_sum(torch.float32, 0.5, 1), torch.lerp

    def reduce(dst: torch.Tensor, srcs: Sequence[torch.Tensor]) -> None:
        mean = lerp(srcs[0], srcs[1], 0.5)
        total = mean.sum()
        if total == total:  # the total is not NaN, so no element is
            dst.copy_(mean)
        else:
            # Between a finite number and infinity, torch interpolates to NaN.
            wide(dst, srcs)

    return in_blocks(reduce)


def _wide_sum(wide: torch.dtype, factor: float, divide: int) -> Reducer:
    def reduce(dst: torch.Tensor, srcs: Sequence[torch.Tensor]) -> None:
        total = srcs[0].to(wide)
        other = torch.empty_like(total)
        for src in srcs[1:]:
            # Adding without copy_() would convert element by element.
            total.add_(other.copy_(src))
        if divide != 1:
            total.div_(divide)
        if factor != 1.0:
            total.mul_(factor)
        dst.copy_(total)

    return reduce


def _scaled(pair: Any, prescale: float, postscale: float) -> Reducer:
    def scale(value: torch.Tensor, factor: float) -> torch.Tensor:
        return value if factor == 1.0 else value * factor

    def reduce(dst: torch.Tensor, srcs: Sequence[torch.Tensor]) -> None:
        total = scale(srcs[0], prescale)
        for src in srcs[1:]:
            total = pair(total, scale(src, prescale))
        dst.copy_(scale(total, postscale))

    return in_blocks(reduce)
