"""Sum or average of sparse tensors: gather the entries of all ranks, then add them up on each rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from horovod.bindings.misuse import wrong_argument
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.core.requests import ReduceOp
from horovod.errors import MismatchError
from horovod.torch.runtime import comm

__all__ = ["sparse_allreduce_async"]

_WIDER = {
    torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64,
    torch.complex64: torch.complex128, torch.int8: torch.int64, torch.uint8: torch.int64, torch.int16: torch.int64,
    torch.int32: torch.int64,
}  # fmt: skip


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start the sum or average of sparse tensors. An average is rounded once, as for dense tensors.

    Collective over ``process_set``; calls are matched by ``name``.

    Args:
        tensor: a COO tensor; same size and number of sparse dimensions on every rank, any number of entries.
        name: key of the match; ``None`` numbers the call, then all ranks must call in one order.
        op: Average or Sum.
        process_set: ranks that take part; this rank must be one of them.

    Returns:
        A function that waits and returns the result, a COO tensor; a sum is not coalesced.

    Raises:
        RequestError: ``tensor`` is not a COO tensor, or ``op`` is neither Average nor Sum.
        MismatchError: sizes disagree; on every rank, with each rank's size, when the returned function is called.
    """
    if tensor.layout is not torch.sparse_coo:
        raise wrong_argument(
            f"sparse_allreduce_async needs a tensor of layout torch.sparse_coo. Received: {tensor.layout}"
        )
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise wrong_argument(f"sparse tensors can be combined by Average and Sum only. Received: {ReduceOp(op).name}")
    tensor = tensor.detach().coalesce()
    # Use one row per entry, so that the ranks' entries can be concatenated.
    indices = tensor.indices().t().contiguous()
    values = tensor.values().contiguous()
    # The ranks compare only the number of dimensions: indices outside of a smaller tensor would be memory errors.
    size = indices.new_tensor([list(tensor.shape)])
    handle = comm.grouped_allgather_async([indices, values, size], name=name, process_set=process_set)
    members = process_set.size() or 1

    def result() -> torch.Tensor:
        indices, values, sizes = comm.synchronize(handle)
        if not sizes.eq(size).all():
            raise MismatchError(
                f"sparse allreduce {name or 'without a name'}: ranks gave tensors of different sizes, in rank order "
                f"{', '.join(str(tuple(each)) for each in sizes.tolist())}; give the same size on every rank"
            )
        if op == ReduceOp.AVERAGE and members > 1:
            return _average(indices.t(), values, tensor.shape, members)
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False)

    return result


def _average(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, members: int) -> torch.Tensor:
    """Add entries with equal indices in a wider dtype, then divide: the average of equal tensors is then exact."""
    wide = values.to(_WIDER.get(values.dtype, values.dtype))
    total = torch.sparse_coo_tensor(indices, wide, shape, check_invariants=False).coalesce()
    is_exact = not (values.is_floating_point() or values.is_complex())
    average = torch.div(total.values(), members, rounding_mode="trunc" if is_exact else None).to(values.dtype)
    return torch.sparse_coo_tensor(total.indices(), average, shape, is_coalesced=True, check_invariants=False)
