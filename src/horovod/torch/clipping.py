"""Clip gradients of which every rank holds a part."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from horovod.bindings.process_sets import ProcessSet
from horovod.core.requests import ReduceOp
from horovod.torch.runtime import comm

__all__ = ["clip_norm", "clip_value"]

#: Added to the norm, as in torch.nn.utils.clip_grad_norm_.
_TINY = 1e-6


@torch.no_grad()
def clip_norm(
    gradients: Sequence[torch.Tensor], most: float, kind: float, error_if_nonfinite: bool, process_set: ProcessSet
) -> torch.Tensor:
    """Scale gradients by the common norm of all ranks' gradients; see ``HostMethods.clip_grad_norm_``."""
    norms = [torch.linalg.vector_norm(gradient, kind).double() for gradient in gradients]
    own = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64)
    name = "DistributedOptimizer.norm"
    if math.isinf(kind):
        total = comm.allreduce(own.max(), name=name, op=ReduceOp.MAX, process_set=process_set)
    else:
        total = comm.allreduce(own.pow(kind).sum(), name=name, op=ReduceOp.SUM, process_set=process_set)
        total = total.pow(1.0 / kind)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the total norm of order {kind} of the gradients of all ranks is {total.item()}, so they cannot be "
            "clipped; pass error_if_nonfinite=False to continue all the same"
        )
    factor = (most / (total + _TINY)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    found: torch.Tensor = total.to(gradients[0].dtype) if gradients else total
    return found


@torch.no_grad()
def clip_value(gradients: Sequence[torch.Tensor], most: float) -> None:
    """Clip every element to ``[-most, most]``."""
    for gradient in gradients:
        gradient.clamp_(-most, most)
