"""Adapter of PyTorch tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from horovod.bindings.adapter import Adapter
from horovod.torch.staging import CudaTensors, StagedCudaTensors, ordinary
from horovod.torch.unsafe import is_transformed
from horovod.transports.kernels_torch import DTYPES

__all__ = ["TorchAdapter"]

_STRIDED = torch.strided
#: A subclass with another one intercepts the operations of kernels, and may have no memory of its own.
_DISPATCH = torch.Tensor.__torch_dispatch__


class TorchAdapter(Adapter):
    """See ``Adapter``."""

    name = "torch"
    kernels = "torch"
    writable = True
    address = staticmethod(torch.Tensor.data_ptr)  # type: ignore[assignment]

    def buffer(self, tensor: Any) -> torch.Tensor | None:
        """Return the tensor without gradient history if it is contiguous, on the host, and not lazily conj or neg;
        else None.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"expected a torch.Tensor, received {type(tensor).__name__}; use torch.as_tensor()")
        if tensor.is_nested:
            raise ValueError("a nested tensor cannot be sent as it is; send its parts, or to_padded_tensor()")
        if tensor.layout is not _STRIDED:
            raise ValueError(
                f"a tensor of layout {tensor.layout} cannot be sent as it is; use to_dense()"
                f"{', or sparse_allreduce_async()' * (tensor.layout is torch.sparse_coo)}"
            )
        if is_transformed(tensor):
            raise ValueError(
                "a collective cannot run inside torch.vmap, torch.func.grad, torch.func.jvp or forward-mode autograd; "
                "call it outside, and differentiate with backward() or torch.autograd.grad()"
            )
        if type(tensor) is not torch.Tensor and type(tensor).__torch_dispatch__ is not _DISPATCH:
            raise ValueError(f"a {type(tensor).__name__} cannot be sent as it is; send the tensors that it consists of")
        if not tensor.is_contiguous() or not tensor.is_cpu or tensor.is_conj() or tensor.is_neg():
            return None
        return tensor if not (tensor.requires_grad or tensor.is_inference()) else _alias(tensor)

    def target(self, tensor: Any) -> torch.Tensor | None:
        """Return ``buffer(tensor)``; refuse an expanded tensor, because its elements share memory."""
        buffer = self.buffer(tensor)
        if (
            buffer is None
            and tensor.numel()
            and any(step == 0 and dim > 1 for step, dim in zip(tensor.stride(), tensor.shape, strict=True))
        ):
            raise ValueError(
                "an expanded tensor cannot be the target of an operation in place: several of its elements share "
                "memory; pass tensor.clone()"
            )
        return buffer

    @staticmethod
    def wrap(buffer: torch.Tensor) -> torch.Tensor:
        return buffer

    def device(self, tensor: torch.Tensor) -> str:
        # ``buffer`` refuses an argument that is not a tensor.
        return "cpu" if getattr(tensor, "is_cpu", True) else str(tensor.device)

    def stage(self, tensors: Sequence[torch.Tensor], targets: Sequence[torch.Tensor] | None) -> StagedCudaTensors:
        if not tensors[0].is_cuda:
            raise ValueError(f"tensors on {tensors[0].device} are not supported; move them to the CPU or to CUDA")
        return StagedCudaTensors(tensors, targets)

    def passed(self, tensors: Sequence[torch.Tensor]) -> CudaTensors:
        return CudaTensors([_alias(t) if _is_plain(t) else self.contiguous(t) for t in tensors])

    def contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy with lazy conj and neg resolved."""
        with torch.inference_mode(False):
            return tensor.detach().clone(memory_format=torch.contiguous_format)

    def write_back(self, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
        ordinary(tensor).copy_(buffer)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> torch.Tensor:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.empty(shape, dtype, like)
        return torch.empty(shape, dtype=DTYPES[dtype], device=like.device)

    def over(self, memory: Any, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.over(memory, shape, dtype)
        tensor = torch.frombuffer(memory, dtype=DTYPES[dtype], count=math.prod(shape))
        # Resize instead of view: autograd forbids in-place changes of a view with another shape.
        return tensor if len(shape) == 1 else tensor.resize_(shape)

    def dtype_name(self, dtype: Any) -> str:
        if dtype is None:
            dtype = torch.get_default_dtype()
        return str(dtype).rpartition(".")[2]

    def splits(self, splits: Any) -> tuple[int, ...]:
        allowed, advice = {torch.int32, torch.int64}, ""
        if isinstance(splits, torch.Tensor):
            allowed, advice = {torch.int32}, "; use splits.int()"
        try:
            tensor = splits if isinstance(splits, torch.Tensor) else torch.as_tensor(splits, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"splits must be a sequence of integers. Received: {splits!r}") from None
        if (tensor.numel() and tensor.dtype not in allowed) or tensor.dim() != 1:
            raise ValueError(
                "splits must be a one-dimensional int32 tensor or a sequence of integers. "
                f"Received: {tensor.dtype}, {tensor.dim()} dimensions{advice}"
            )
        return tuple(tensor.tolist())

    def received_splits(self, splits: tuple[int, ...], like: Any) -> torch.Tensor:
        return torch.tensor(splits, dtype=torch.int32, device="cpu")


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_inference():
        return ordinary(tensor)
    return tensor.detach() if tensor.requires_grad else tensor
