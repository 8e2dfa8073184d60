"""Tensors of inference mode, made usable on any thread.

The mode belongs to a thread. A tensor that was made in it cannot be written outside of it, but the engine works on
several threads, and keeps its tensors for the next call.
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
