"""Parameters, gradients and flat buffers of torch, as the reduction of gradients needs them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from horovod.torch.optimizer_state import dense_stride
from horovod.torch.reduction.slots import GradSlot
from horovod.torch.runtime import comm
from horovod.transports.kernels_torch import DTYPES

__all__ = ["adopt", "describe", "fingerprint", "has_changed", "mark", "owners", "sparse_dim", "view", "zeros"]

#: Number of elements of each parameter that are compared: a model that was not broadcast differs there already.
_LOOK_AT = 1024
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

owners: Any = WeakTensorKeyDictionary()
"""The reducer of a parameter's gradient, for as long as the parameter lives."""


def describe(parameter: torch.Tensor) -> str:
    """Return dtype, shape and strides in words."""
    dtype, shape, strides = str(parameter.dtype), tuple(parameter.shape), dense_stride(parameter)
    return f"{dtype.removeprefix('torch.')}, shape {shape}, strides {tuple(strides)}"


def fingerprint(parameter: torch.Tensor) -> int:
    """Return the sum of the first values, taken as integers."""
    values = parameter.detach()
    values = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)[:_LOOK_AT]
    return int(values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64))


def sparse_dim(parameter: torch.Tensor) -> int:
    """Return the number of sparse dimensions of its gradient; 0 for a dense one."""
    grad = parameter.grad
    return 0 if grad is None or grad.layout is torch.strided else grad.sparse_dim()


def mark(parameter: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """Return the gradient and torch's count of what was written to it; -1 for a part of something larger.

    There the count is that of the whole: where all gradients lie in one tensor, it counts those of the others.
    """
    grad = parameter.grad
    return None if grad is None else (grad, -1 if grad._is_view() else grad._version)


def has_changed(parameter: torch.Tensor, mark: tuple[torch.Tensor, int]) -> bool:
    """Whether the gradient is another one than when it was marked."""
    grad = parameter.grad
    return grad is not None and (grad is not mark[0] or mark[1] not in (-1, grad._version))


def adopt(slot: GradSlot) -> bool:
    """Make the gradient, if there is one, lie in ``slot.view``; return whether there is one."""
    parameter, view = slot.parameter, slot.view
    grad = parameter.grad
    if grad is view:
        return True
    if grad is None:
        return False
    if grad.requires_grad:
        grad = grad.detach()
    if grad.layout is not torch.strided:
        slot.sparse_dim = slot.sparse_dim or grad.sparse_dim()
        grad = grad.to_dense()
    view.copy_(grad)
    parameter.grad = view
    return True


def zeros(count: int, like: torch.Tensor, dtype: str | None = None) -> torch.Tensor:
    """Return zeros, in the arena if they belong on the host."""
    kind = DTYPES[dtype] if dtype else like.dtype
    if like.device.type == "cpu":
        shared: torch.Tensor = comm.zeros(count, dtype=kind)
        return shared
    return torch.zeros(count, dtype=kind, device=like.device)


def view(buffer: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient's place, with the strides that optimizers like best: the parameter's own."""
    flat = buffer[offset : offset + parameter.numel()]
    return flat.as_strided(parameter.shape, dense_stride(parameter), flat.storage_offset())
