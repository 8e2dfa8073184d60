"""Conversion of inference-mode tensors for use on any thread.

Inference mode is a property of a thread. A tensor made in it cannot be written outside it, but the engine runs on
several threads and reuses its tensors in the next call.
"""

from __future__ import annotations

import torch

__all__ = ["ordinary"]


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias without gradient history that can be written in any mode."""
    if not tensor.is_inference():
        return tensor.detach()
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.is_conj():
            alias = alias.conj()
        return torch._neg_view(alias) if tensor.is_neg() else alias
