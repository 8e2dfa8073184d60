"""The adapter of torch for ``horovod.bindings.gradients``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from horovod.bindings.compression import compress, decompress
from horovod.bindings.gradients.adapter import GradientAdapter, GradSlot, Hook
from horovod.bindings.gradients.settings import ReduceSettings
from horovod.bindings.misuse import out_of_turn
from horovod.torch.optimizer_state import dense_stride
from horovod.torch.runtime import comm
from horovod.torch.sparse import sparse_allreduce_async
from horovod.transports.kernels_torch import DTYPES

__all__ = ["TorchGradients"]

#: Number of elements compared per parameter: enough to detect a model that was not broadcast.
_LOOK_AT = 1024
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TorchGradients(GradientAdapter):
    """See ``GradientAdapter``; a buffer is a flat tensor."""

    def __init__(self) -> None:
        self.comm = comm
        self.owners: Any = WeakTensorKeyDictionary()

    # -- parameters ----------------------------------------------------------------------------------------------

    def describe(self, parameter: torch.Tensor) -> str:
        dtype, shape, strides = str(parameter.dtype), tuple(parameter.shape), dense_stride(parameter)
        return f"{dtype.removeprefix('torch.')}, shape {shape}, strides {tuple(strides)}"

    def fingerprint(self, parameter: torch.Tensor) -> int:
        values = parameter.detach()
        values = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)[:_LOOK_AT]
        return int(values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64))

    def count(self, parameter: torch.Tensor) -> int:
        return parameter.numel()

    def dtype(self, parameter: torch.Tensor) -> str:
        return comm.adapter.dtype_name(_grad_dtype(parameter))

    def itemsize(self, parameter: torch.Tensor) -> int:
        return _grad_dtype(parameter).itemsize

    def kind(self, parameter: torch.Tensor) -> tuple[torch.dtype, torch.device]:
        return _grad_dtype(parameter), parameter.device

    # -- gradients -----------------------------------------------------------------------------------------------

    def hook(self, parameter: torch.Tensor, function: Callable[[torch.Tensor], None]) -> Hook:
        register: Callable[..., Hook] = parameter.register_post_accumulate_grad_hook
        return register(function)

    def quietly(self) -> AbstractContextManager[Any]:
        return torch.no_grad()

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return parameter.grad

    def sparse_dim(self, parameter: torch.Tensor) -> int:
        grad = parameter.grad
        return 0 if grad is None or grad.layout is torch.strided else grad.sparse_dim()

    def mark(self, parameter: torch.Tensor) -> tuple[torch.Tensor, int] | None:
        """Return the gradient and torch's count of writes to it; -1 instead of the count if the gradient is a view.

        A view shares the count of its whole base tensor, so writes to other gradients would change it.
        """
        grad = parameter.grad
        return None if grad is None else (grad, -1 if grad._is_view() else grad._version)

    def has_changed(self, parameter: torch.Tensor, mark: tuple[torch.Tensor, int]) -> bool:
        grad = parameter.grad
        return grad is not None and (grad is not mark[0] or mark[1] not in (-1, grad._version))

    def lies_in_bucket(self, slot: GradSlot) -> bool:
        grad = slot.parameter.grad
        # The gradient can be the same object in other memory, after ``parameter.grad.data = ...``.
        return grad is not None and grad is slot.view and grad.data_ptr() == slot.home.data_ptr()

    def adopt(self, slot: GradSlot) -> bool:
        grad: torch.Tensor | None = slot.parameter.grad
        if grad is None or self.lies_in_bucket(slot):
            return grad is not None
        if grad.requires_grad:
            grad = grad.detach()
        if grad.layout is not torch.strided:
            slot.sparse_dim = slot.sparse_dim or grad.sparse_dim()
            grad = grad.to_dense()
        home = slot.home
        if (grad.dtype, grad.shape, grad.device) != (home.dtype, home.shape, home.device):
            now, before = (f"{self.describe(tensor)} on {tensor.device}" for tensor in (slot.parameter, home))
            raise out_of_turn(
                f"{slot.name} is {now} now, and was {before} in the first step",
                "Change a model before its DistributedOptimizer is made, or make another one, on all ranks.",
            )
        home.copy_(grad)
        self.give(slot)
        return True

    def give(self, slot: GradSlot) -> None:
        if slot.view is None or slot.view.data_ptr() != slot.home.data_ptr():
            slot.view = slot.home.view_as(slot.home)
        slot.parameter.grad = slot.view

    def make_sparse(self, slot: GradSlot) -> None:
        slot.parameter.grad = slot.home.to_sparse(slot.sparse_dim)

    @torch.no_grad()
    def start_unbucketed(self, slot: GradSlot, settings: ReduceSettings, name: str) -> Callable[[], None]:
        start = _start_sparse if slot.sparse_dim and not settings.sparse_as_dense else _start_compressed
        return start(slot, settings, name)

    # -- buffers -------------------------------------------------------------------------------------------------

    def zeros(self, count: int, like: torch.Tensor, dtype: str | None = None) -> torch.Tensor:
        """Return zeros, in the arena for a host parameter."""
        kind = DTYPES[dtype] if dtype else _grad_dtype(like)
        if like.device.type == "cpu":
            shared: torch.Tensor = comm.zeros(count, dtype=kind)
            return shared
        return torch.zeros(count, dtype=kind, device=like.device)

    def view(self, buffer: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
        """Return a gradient's view with the parameter's own strides, which are fastest for optimizers."""
        flat = buffer[offset : offset + parameter.numel()]
        return flat.as_strided(parameter.shape, dense_stride(parameter), flat.storage_offset())

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        into.copy_(source)

    def fill(self, buffer: torch.Tensor, value: float) -> None:
        buffer.fill_(value)

    def write(self, buffer: torch.Tensor, values: list[float]) -> None:
        buffer.copy_(torch.tensor(values, dtype=buffer.dtype, device=buffer.device))

    def read(self, buffer: torch.Tensor) -> list[float]:
        values: list[float] = buffer.tolist()
        return values

    def version(self, buffer: torch.Tensor) -> int:
        return buffer._version

    def unwatched(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.data


def _grad_dtype(parameter: torch.Tensor) -> torch.dtype:
    # Since torch 2.10 it can be another one, such as float32 for a parameter in bfloat16.
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def _start_sparse(slot: GradSlot, settings: ReduceSettings, name: str) -> Callable[[], None]:
    parameter, grad = slot.parameter, slot.parameter.grad
    if grad is None:
        grad = _nothing(parameter, slot.sparse_dim)
    elif grad.layout is torch.strided:
        grad = grad.to_sparse(slot.sparse_dim)
    result = sparse_allreduce_async(grad, name, settings.op, settings.process_set)

    def finish() -> None:
        reduced = result()
        if parameter.grad is not None or reduced._nnz() > 0:
            parameter.grad = reduced.coalesce()

    return finish


def _nothing(parameter: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    indices = torch.empty((sparse_dim, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[sparse_dim:]), dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def _start_compressed(slot: GradSlot, settings: ReduceSettings, name: str) -> Callable[[], None]:
    parameter, grad = slot.parameter, slot.parameter.grad
    if grad is None:
        grad = torch.zeros_like(parameter, dtype=_grad_dtype(parameter))
    elif grad.layout is not torch.strided:
        grad = grad.to_dense()
    (wire,), contexts = compress(settings.compression, [grad.detach()])
    # ``wire`` may be the gradient itself: writes of the engine must not count as changes by the user.
    handle = comm.allreduce_async_(wire.contiguous().data, name=name, **settings.keywords)

    def finish() -> None:
        (reduced,) = decompress(settings.compression, [comm.synchronize(handle)], contexts)
        parameter.grad = reduced.to_sparse(slot.sparse_dim) if slot.sparse_dim else reduced

    return finish
