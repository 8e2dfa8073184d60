"""Tensors of inference mode, as any thread may use them.

The mode belongs to a thread. What was made in it cannot be written outside of it, and the engine works on
whatever thread has time, and keeps what it made for the next call.
"""

from __future__ import annotations

import torch

__all__ = ["ordinary"]


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias without history, which may be written in any mode."""
    if not tensor.is_inference():
        return tensor.detach()
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.is_conj():
            alias = alias.conj()
        return torch._neg_view(alias) if tensor.is_neg() else alias
