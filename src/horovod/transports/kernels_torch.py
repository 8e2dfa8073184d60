"""The kernels of PyTorch, on host memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from horovod.core.requests import ReduceOp
from horovod.transports.kernels import Reducer
from horovod.transports.kernels_numpy import NumpyKernels

__all__ = ["DTYPES", "TorchKernels"]

DTYPES: dict[str, torch.dtype] = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "uint16": torch.uint16,
    "int16": torch.int16,
    "uint32": torch.uint32,
    "int32": torch.int32,
    "uint64": torch.uint64,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}
_HALF = (torch.float16, torch.bfloat16)
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


class TorchKernels:
    """See ``Kernels``."""

    name = "torch"

    def view(self, memory: Any, offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor of ``shape`` over ``memory`` at byte ``offset``; no copy."""
        count = 1
        for dim in shape:
            count *= dim
        if count == 0:
            return torch.empty(shape, dtype=DTYPES[dtype])
        return torch.frombuffer(memory, dtype=DTYPES[dtype], count=count, offset=offset).view(shape)

    def scratch(self, dtype: str, count: int) -> torch.Tensor:
        """Return an uninitialised private 1-D tensor."""
        return torch.empty(count, dtype=DTYPES[dtype])

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy ``src`` over ``dst``."""
        dst.copy_(src)

    @functools.lru_cache(maxsize=1024)  # noqa: B019  there is one object of this class, for ever
    def reducer(self, dtype: str, op: ReduceOp, prescale: float, postscale: float, divisor: int) -> Reducer:
        """Return ``fn(dst, srcs)``, see ``Kernels.reducer``."""
        kind = DTYPES[dtype]
        if kind is torch.bool:
            return _plain(_BOOL_PAIR[op])
        if dtype in _NOT_IN_TORCH:
            return _through_numpy(NumpyKernels().reducer(dtype, op, prescale, postscale, divisor))
        floating = kind.is_floating_point or kind.is_complex
        pair = _PAIR[op]
        if floating and op in (ReduceOp.SUM, ReduceOp.AVERAGE):
            factor, divide = prescale * postscale, divisor if op is ReduceOp.AVERAGE else 1
            if divide & (divide - 1) == 0:
                factor, divide = factor / divide, 1
            return _half_sum(factor, divide) if kind in _HALF else _float_sum(factor, divide)
        if prescale == 1.0 and postscale == 1.0 and op is not ReduceOp.AVERAGE:
            return _plain(pair)
        if prescale == 1.0 and postscale == 1.0:
            return _integer_average(divisor)
        return _scaled(pair, prescale, postscale / divisor if op is ReduceOp.AVERAGE else postscale, floating)

    def gram(self, srcs: Sequence[torch.Tensor]) -> list[list[float]]:
        """Return the inner product of every two ``srcs``, in float64."""
        matrix = torch.stack([src.to(torch.float64) for src in srcs])
        products: list[list[float]] = (matrix @ matrix.T).tolist()
        return products

    def combine(self, dst: torch.Tensor, srcs: Sequence[torch.Tensor], weights: Sequence[float]) -> None:
        """Write the weighted sum of ``srcs``, taken in float64, to ``dst``."""
        total = srcs[0].to(torch.float64) * weights[0]
        for src, weight in zip(srcs[1:], weights[1:], strict=True):
            total.add_(src, alpha=weight)
        dst.copy_(total)


def _plain(pair: Any) -> Reducer:
    def reduce(dst: torch.Tensor, srcs: Sequence[torch.Tensor]) -> None:
        if len(srcs) == 1:
            dst.copy_(srcs[0])
            return
        pair(srcs[0], srcs[1], out=dst)
        for src in srcs[2:]:
            pair(dst, src, out=dst)

    return reduce


def _through_numpy(reducer: Reducer) -> Reducer:
    def reduce(dst: torch.Tensor, srcs: Sequence[torch.Tensor]) -> None:
        reducer(dst.numpy(), [src.numpy() for src in srcs])

    return reduce


def _float_sum(factor: float, divide: int) -> Reducer:
    add = torch.add
    # Wrapping a Python number costs more than the arithmetic on a small tensor.
    by, times = torch.tensor(float(divide), dtype=torch.float64), torch.tensor(factor, dtype=torch.float64)

    def reduce(dst: torch.Tensor, srcs: Sequence[torch.Tensor]) -> None:
        if len(srcs) == 2:
            add(srcs[0], srcs[1], out=dst)
        elif len(srcs) == 1:
            dst.copy_(srcs[0])
        else:
            add(srcs[0], srcs[1], out=dst)
            for src in srcs[2:]:
                dst.add_(src)
        if divide != 1:
            dst.div_(by)
        if factor != 1.0:
            dst.mul_(times)

    return reduce


def _half_sum(factor: float, divide: int) -> Reducer:
    plain = _plain(torch.add) if factor == 1.0 and divide == 1 else None

    def reduce(dst: torch.Tensor, srcs: Sequence[torch.Tensor]) -> None:
        if plain is not None and len(srcs) <= 2:
            plain(dst, srcs)
            return
        total = srcs[0].to(torch.float32)
        for src in srcs[1:]:
            total += src
        if divide != 1:
            total.div_(divide)
        if factor != 1.0:
            total.mul_(factor)
        dst.copy_(total)

    return reduce


def _integer_average(divisor: int) -> Reducer:
    total = _plain(torch.add)

    def reduce(dst: torch.Tensor, srcs: Sequence[torch.Tensor]) -> None:
        total(dst, srcs)
        dst.copy_(torch.div(dst, divisor, rounding_mode="trunc"))

    return reduce


def _scaled(pair: Any, prescale: float, postscale: float, floating: bool) -> Reducer:
    def scale(value: torch.Tensor, factor: float) -> torch.Tensor:
        if factor == 1.0:
            return value
        if value.is_complex():
            return value * factor
        wide = value.to(torch.float64) * factor
        return (wide if floating else wide.trunc()).to(value.dtype)

    def reduce(dst: torch.Tensor, srcs: Sequence[torch.Tensor]) -> None:
        total = scale(srcs[0], prescale)
        for src in srcs[1:]:
            total = pair(total, scale(src, prescale))
        dst.copy_(scale(total, postscale))

    return reduce
