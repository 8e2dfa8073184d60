"""The synchronous collectives of torch that autograd may differentiate through.

If no tensor requires a gradient, which is the usual case, they call the plain collectives: autograd
costs more than a small allreduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod.bindings.compression import compress, decompress
from horovod.bindings.docstrings import explained_like
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.bindings.reductions import Reduction, resolve_op
from horovod.core.requests import ReduceOp
from horovod.torch import gradients
from horovod.torch.compression import Compression, Compressor
from horovod.torch.runtime import comm

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]

_grad_enabled = torch.is_grad_enabled


def _wanted(tensors: Sequence[torch.Tensor]) -> bool:
    # A later check refuses an argument that is not a tensor, with a clear error.
    return _grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors)


@explained_like(comm.allreduce)
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combine a tensor over all ranks, element by element; differentiable.

    Collective over ``process_set``; calls are matched by ``name``.

    Returns:
        A new tensor of the same shape, dtype and device.
    """
    if compression is Compression.none and not (getattr(tensor, "requires_grad", False) and _grad_enabled()):
        plain: torch.Tensor = comm.allreduce(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
        return plain
    return grouped_allreduce([tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set)[
        0
    ]


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Combine several tensors over all ranks in one operation; differentiable.

    See ``allreduce`` for arguments, errors and blocking.

    Returns:
        New tensors, in the order of ``tensors``.
    """
    how = Reduction(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    wires, contexts = compress(compression, tensors)
    reduced: Sequence[torch.Tensor]
    if _wanted(wires):
        reduced = gradients.allreduce(name, how, *(wire.contiguous() for wire in wires))
    else:
        reduced = comm.grouped_allreduce(wires, name=name, **how.keywords)
    return decompress(compression, reduced, contexts)


@explained_like(comm.allgather)
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate every rank's tensor along the first dimension, in rank order; differentiable.

    Returns:
        A new tensor on the same device.
    """
    if not (getattr(tensor, "requires_grad", False) and _grad_enabled()):
        plain: torch.Tensor = comm.allgather(tensor, name, process_set)
        return plain
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Gather several tensors in one operation; differentiable. See ``allgather``.

    Returns:
        New tensors, in the order of ``tensors``.
    """
    if not _wanted(tensors):
        return tuple(comm.grouped_allgather(tensors, name, process_set))
    return tuple(gradients.allgather(name, process_set, *(tensor.contiguous() for tensor in tensors)))


@explained_like(comm.broadcast)
def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the root's tensor on every rank; differentiable.

    Returns:
        A new tensor.
    """
    if not (getattr(tensor, "requires_grad", False) and _grad_enabled()):
        plain: torch.Tensor = comm.broadcast(tensor, root_rank, name, process_set)
        return plain
    return gradients.broadcast(name, process_set, root_rank, tensor.contiguous())


@explained_like(comm.alltoall)
def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a part of the tensor to every rank, and receive a part from each; differentiable.

    Returns:
        The received rows, in rank order; with ``splits`` also the number of rows that each rank sent.
    """
    if not (getattr(tensor, "requires_grad", False) and _grad_enabled()):
        return comm.alltoall(tensor, splits, name, process_set)
    output, received = gradients.alltoall(name, process_set, splits, tensor.contiguous())
    return output if splits is None else (output, received)


@explained_like(comm.reducescatter)
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combine a tensor over all ranks and keep this rank's rows; differentiable for Sum and Average.

    Returns:
        This rank's rows, a new tensor.
    """
    if compression is Compression.none and not (getattr(tensor, "requires_grad", False) and _grad_enabled()):
        plain: torch.Tensor = comm.reducescatter(
            tensor, name, resolve_op(op, None), process_set, prescale_factor, postscale_factor
        )
        return plain
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Combine several tensors over all ranks and keep this rank's rows of each. See ``reducescatter``.

    Returns:
        This rank's rows of each, in the order of ``tensors``.
    """
    how = Reduction(resolve_op(op, None), prescale_factor, postscale_factor, process_set)
    wires, contexts = compress(compression, tensors)
    reduced: Sequence[torch.Tensor]
    if _wanted(wires):
        reduced = gradients.reducescatter(name, how, *(wire.contiguous() for wire in wires))
    else:
        reduced = comm.grouped_reducescatter(wires, name=name, **how.keywords)
    return decompress(compression, reduced, contexts)
