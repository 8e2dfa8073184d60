"""Reduction of gradients outside buckets: sparse ones, and those that a user's stateless compressor packs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from horovod.bindings.compression import compress, decompress
from horovod.bindings.gradients.collective import begin_allreduce
from horovod.bindings.gradients.gradient_slots import GradSlot
from horovod.bindings.gradients.settings import ReduceSettings
from horovod.torch.runtime import comm
from horovod.torch.sparse import sparse_allreduce_async

__all__ = ["start_unbucketed"]


@torch.no_grad()
def start_unbucketed(slot: GradSlot, settings: ReduceSettings, name: str) -> Callable[[], None]:
    """Start the reduction of one gradient; the returned function waits and stores the result."""
    start = _start_sparse if slot.sparse_dim and not settings.sparse_as_dense else _start_compressed
    return start(slot, settings, name)


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
        grad = torch.zeros_like(parameter)
    elif grad.layout is not torch.strided:
        grad = grad.to_dense()
    (wire,), contexts = compress(settings.compression, [grad.detach()])
    # ``wire`` may be the gradient itself: writes of the engine must not count as changes by the user.
    handle = begin_allreduce(comm, wire.contiguous().data, settings, name)

    def finish() -> None:
        (reduced,) = decompress(settings.compression, [comm.synchronize(handle)], contexts)
        parameter.grad = reduced.to_sparse(slot.sparse_dim) if slot.sparse_dim else reduced

    return finish
