"""Derivatives of the collectives, as autograd functions.

A rank's loss depends on other ranks' inputs. The meaning of "the gradient" is then a convention, and this is
Horovod's: allreduce and alltoall give the gradient of the *sum* of all ranks' losses; allgather and
broadcast that of their *average*; reducescatter n times that of the average when it averages, and n times that of
the sum when it sums. Min, Max and Product have their true derivatives (of the sum of losses; ties
share evenly), where Horovod reduced the gradients with the same operation.

All operations can be differentiated once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod.bindings.process_sets import ProcessSet
from horovod.bindings.reductions import Reduction
from horovod.core.requests import ReduceOp
from horovod.errors import HorovodInternalError
from horovod.torch.runtime import comm

__all__ = ["Saved", "allgather", "allreduce", "alltoall", "broadcast", "once", "reducescatter"]

Saved = tuple[torch.Tensor, ...]

_LINEAR = (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM)


def _name(name: str | None) -> str | None:
    return name and f"{name}.gradient"


class _Refusal(torch.autograd.Function):
    """Returns the first tensors; its derivative raises. The other tensors are those on which they depend."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise RuntimeError("trying to differentiate twice a collective of horovod, which has only a first derivative")


#: ``(count, *tensors)``
_refused: Callable[..., tuple[torch.Tensor, ...]] = _Refusal.apply


def once(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Return a ``backward`` that refuses a second derivative; the given one takes the saved tensors, too.

    Torch's ``once_differentiable`` does so only if all paths are followed; ``torch.autograd.grad()`` would silently
    leave its part out.
    """

    @functools.wraps(backward)
    def first(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # read once: a non-reentrant checkpoint computes them for one reader
        with torch.no_grad():
            found = list(backward(ctx, saved, *grads))
        of = [x for x in (*grads, *saved) if x is not None and x.requires_grad]
        if torch.is_grad_enabled() and of:
            places = [place for place, value in enumerate(found) if value is not None]
            results = _refused(len(places), *(found[place] for place in places), *of)
            for place, result in zip(places, results, strict=True):
                found[place] = result
        return tuple(found)

    return first


class _Allreduce(torch.autograd.Function):
    """allreduce of several tensors at once."""

    @staticmethod
    def forward(ctx: Any, name: str | None, how: Reduction, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Reduce."""
        ctx.name, ctx.how = name, how
        inputs = [tensor.detach() for tensor in tensors]
        outputs = tuple(comm.grouped_allreduce(inputs, name=name, **how.keywords))
        if how.op not in _LINEAR:
            ctx.save_for_backward(*tensors, *outputs)
        return outputs

    @staticmethod
    @once
    def backward(ctx: Any, saved: Saved, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Reduce the gradients as the tensors were, and chain with the derivative of the operation."""
        how: Reduction = ctx.how
        if how.op in _LINEAR:
            reduced = _allreduce(grads, ctx.name, how)
            return (None, None, *reduced)
        count = len(grads)
        inputs, outputs = saved[:count], saved[count:]
        summed = _allreduce(grads, ctx.name, Reduction(ReduceOp.SUM, process_set=how.process_set))
        local = _local_derivatives(inputs, outputs, ctx.name, how)
        return (None, None, *(total * slope.conj() for total, slope in zip(summed, local, strict=True)))


def _allreduce(tensors: Sequence[torch.Tensor], name: str | None, how: Reduction) -> list[torch.Tensor]:
    return comm.grouped_allreduce([tensor.contiguous() for tensor in tensors], name=_name(name), **how.keywords)


def _local_derivatives(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], name: str | None, how: Reduction
) -> list[torch.Tensor]:
    """d output / d this rank's input, elementwise, for the operations that are not linear."""
    factor = how.prescale * how.postscale
    total = Reduction(ReduceOp.SUM, process_set=how.process_set)
    if how.op in (ReduceOp.MIN, ReduceOp.MAX):
        # The same arithmetic as forward, so that this rank's value compares equal to the output it gave.
        winners = [(x * how.prescale * how.postscale == y).to(x.dtype) for x, y in zip(inputs, outputs, strict=True)]
        ties = _allreduce(winners, name and f"{name}.ties", total)
        return [won * factor / tied.clamp(min=1) for won, tied in zip(winners, ties, strict=True)]
    scaled = [x * how.prescale for x in inputs]
    zero = [x == 0 for x in scaled]
    zeros = _allreduce([z.to(x.dtype) for z, x in zip(zero, scaled, strict=True)], name and f"{name}.zeros", total)
    nonzero = [torch.where(z, torch.ones_like(x), x) for z, x in zip(zero, scaled, strict=True)]
    product = _allreduce(nonzero, name and f"{name}.product", Reduction(ReduceOp.PRODUCT, 1.0, 1.0, how.process_set))
    return [
        torch.where(found - z.to(found.dtype) == 0, whole / own, torch.zeros_like(whole)) * factor
        for found, z, whole, own in zip(zeros, zero, product, nonzero, strict=True)
    ]


class _Allgather(torch.autograd.Function):
    """allgather of several tensors at once."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Gather."""
        ctx.name, ctx.process_set = name, process_set
        ctx.rows = [tensor.shape[0] if tensor.dim() else 1 for tensor in tensors]
        inputs = [tensor.detach() for tensor in tensors]
        return tuple(comm.grouped_allgather(inputs, name=name, process_set=process_set))

    @staticmethod
    @once
    def backward(ctx: Any, saved: Saved, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Average the gradients and take this rank's rows."""
        process_set: ProcessSet = ctx.process_set
        place = process_set.rank()
        own = torch.tensor([[place, *ctx.rows]], device="cpu")
        # Ranks that have joined are not in it.
        table = comm.allgather(own, name=ctx.name and f"{ctx.name}.rows", process_set=process_set)
        places, rows = table[:, 0], table[:, 1:]
        if rows.sum(dim=0).tolist() != [grad.shape[0] for grad in grads]:
            raise HorovodInternalError(
                f"the gradient of allgather {ctx.name or 'without a name'} has rows of a rank that has called join "
                "since; that rank must compute the gradient, too, before it joins"
            )
        before = rows[places < place].sum(dim=0).tolist()
        average = Reduction(process_set=process_set)
        reduced = _allreduce(grads, ctx.name, average)
        parts = zip(reduced, before, ctx.rows, strict=True)
        return (None, None, *(grad.narrow(0, start, length) for grad, start, length in parts))


class _Broadcast(torch.autograd.Function):
    """broadcast."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, root_rank: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Broadcast."""
        ctx.name, ctx.process_set, ctx.root_rank = name, process_set, root_rank
        output: torch.Tensor = comm.broadcast(tensor.detach(), root_rank, name=name, process_set=process_set)
        return output

    @staticmethod
    @once
    def backward(ctx: Any, saved: Saved, grad: torch.Tensor) -> tuple[Any, ...]:
        """Average the gradients for the root; return zeros on other ranks, whose inputs had no effect."""
        (reduced,) = _allreduce([grad], ctx.name, Reduction(process_set=ctx.process_set))
        return None, None, None, reduced if comm.rank() == ctx.root_rank else torch.zeros_like(grad)


class _Alltoall(torch.autograd.Function):
    """alltoall; returns the output and the number of rows from each rank."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, splits: Any, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange."""
        handle = comm.alltoall_async(tensor.detach(), splits, name=name, process_set=process_set)
        output, received = comm.synchronize(handle)
        ctx.name, ctx.process_set, ctx.received = name, process_set, received
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    @once
    def backward(ctx: Any, saved: Saved, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
        """Send every row's gradient back to the rank that sent the row."""
        handle = comm.alltoall_async(grad.contiguous(), ctx.received, name=_name(ctx.name), process_set=ctx.process_set)
        return None, None, None, comm.synchronize(handle)[0]


class _Reducescatter(torch.autograd.Function):
    """reducescatter of several tensors at once."""

    @staticmethod
    def forward(ctx: Any, name: str | None, how: Reduction, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Reduce and scatter."""
        ctx.name, ctx.how = name, how
        inputs = [tensor.detach() for tensor in tensors]
        return tuple(comm.grouped_reducescatter(inputs, name=name, **how.keywords))

    @staticmethod
    @once
    def backward(ctx: Any, saved: Saved, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Gather every rank's gradient of its rows."""
        how: Reduction = ctx.how
        if how.op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            raise NotImplementedError(
                f"reducescatter is differentiable for Sum and Average only. Received: {how.op.name.capitalize()}"
            )
        factor = how.prescale * how.postscale
        if how.op is ReduceOp.SUM:
            factor *= how.process_set.size() or 1
        scaled = [(grad if factor == 1.0 else grad * factor).contiguous() for grad in grads]
        return (None, None, *comm.grouped_allgather(scaled, name=_name(ctx.name), process_set=how.process_set))


#: ``(name, how, *tensors)``
allreduce: Callable[..., tuple[torch.Tensor, ...]] = _Allreduce.apply
#: ``(name, process_set, *tensors)``
allgather: Callable[..., tuple[torch.Tensor, ...]] = _Allgather.apply
#: ``(name, process_set, root_rank, tensor)``
broadcast: Callable[..., torch.Tensor] = _Broadcast.apply
#: ``(name, process_set, splits, tensor)``; returns output and received splits
alltoall: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _Alltoall.apply
#: ``(name, how, *tensors)``
reducescatter: Callable[..., tuple[torch.Tensor, ...]] = _Reducescatter.apply
