"""Sparse tensors: gathered, not reduced; every rank's rows stand behind each other."""

from __future__ import annotations

from collections.abc import Callable

import torch

from horovod.bindings.misuse import wrong_argument
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.core.requests import ReduceOp
from horovod.torch.runtime import comm

__all__ = ["sparse_allreduce_async"]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start the sum or average of sparse tensors.

    Collective over ``process_set``; calls are matched by ``name``.

    Args:
        tensor: a COO tensor; same size and number of sparse dimensions on every rank, any number of entries.
        name: key of the match; ``None`` numbers the call, then all ranks must call in one order.
        op: Average or Sum.
        process_set: ranks that take part; this rank must be one of them.

    Returns:
        A function that waits and returns the result, a COO tensor that is not coalesced.

    Raises:
        RequestError: the tensor is not sparse, or the op is another.
    """
    if tensor.layout is not torch.sparse_coo:
        raise wrong_argument(
            f"sparse_allreduce_async needs a tensor of layout torch.sparse_coo. Received: {tensor.layout}"
        )
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise wrong_argument(f"sparse tensors can be combined by Average and Sum only. Received: {ReduceOp(op).name}")
    tensor = tensor.detach().coalesce()
    # One row per entry, so that ranks' entries can be put behind each other.
    indices = tensor.indices().t().contiguous()
    values = tensor.values().contiguous()
    handles = [
        comm.allgather_async(indices, name=name and f"{name}.indices", process_set=process_set),
        comm.allgather_async(values, name=name and f"{name}.values", process_set=process_set),
    ]
    divisor = process_set.size() if op == ReduceOp.AVERAGE else 1

    def result() -> torch.Tensor:
        all_indices, all_values = (comm.synchronize(handle) for handle in handles)
        if divisor != 1:
            all_values = all_values / divisor
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape, check_invariants=False)

    return result
