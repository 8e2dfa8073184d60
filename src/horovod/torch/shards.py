"""One rank's share of a bucket's weights, which only that rank steps; all weights of a bucket share an arena buffer.

The parameters of a CPU model are views of that buffer: weights received from other ranks need no further copy.
Weights of a device are also kept on the host, and copied to the device.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from horovod.bindings.gradients.adapter import GradSlot
from horovod.bindings.gradients.buckets import Bucket
from horovod.bindings.gradients.names import WEIGHTS
from horovod.bindings.misuse import out_of_turn, wrong_argument
from horovod.bindings.process_sets import ProcessSet
from horovod.core.requests import ReduceOp
from horovod.torch.optimizer_methods import gradients
from horovod.torch.runtime import comm

__all__ = ["Shard", "WeightPiece", "check_elementwise", "clip_norm", "unhooked_step"]

#: Optimizers that treat each element of a parameter independently, so that ranks can step parts.
_ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip

#: Added to the norm, as in torch.nn.utils.clip_grad_norm_.
_TINY = 1e-6


@dataclass(eq=False)
class WeightPiece:
    """The part of one parameter that this rank steps."""

    slot: GradSlot
    start: int  # index of the first element, in the parameter's memory order
    weights: torch.Tensor  # the elements; a view of the buffer


class Shard:
    """This rank's share of a bucket, among the ranks of a process set."""

    def __init__(self, bucket: Bucket, process_set: ProcessSet) -> None:
        self.bucket = bucket
        # this rank's part of each parameter, by the parameter's id; many parameters have none
        self.pieces: dict[int, WeightPiece] = {}
        self._process_set = process_set
        self._handle: int | None = None
        layout, first = bucket.layout, bucket.slots[0].parameter
        share = layout.flags // (process_set.size() or 1)
        low = share * (process_set.rank() or 0)
        self._weights: torch.Tensor = comm.zeros(layout.flags, dtype=first.dtype)
        self._home = self._weights if first.is_cpu else torch.zeros_like(self._weights, device=first.device)
        self._own = self._weights[low : low + share]
        self._views = [
            gradients.view(self._home, offset, slot.parameter)
            for slot, offset in zip(bucket.slots, layout.offsets, strict=True)
        ]
        for slot, offset in zip(bucket.slots, layout.offsets, strict=True):
            begin, end = max(offset, low), min(offset + slot.parameter.numel(), low + share)
            if begin < end:
                self.pieces[id(slot.parameter)] = WeightPiece(slot, begin - offset, self._weights[begin:end])
        self.settle()

    def settle(self) -> None:
        """Move the parameters into the buffer, also those whose memory was replaced since the last call.

        Raises:
            OptimizerUseError: the dtype, shape or device of a parameter has changed.
        """
        for slot, view in zip(self.bucket.slots, self._views, strict=True):
            data = slot.parameter.data
            if data.data_ptr() == view.data_ptr():
                continue
            if data.dtype != view.dtype or data.shape != view.shape or data.device != view.device:
                raise out_of_turn(
                    f"{slot.name} was {view.dtype} {list(view.shape)} on {view.device} and is now {data.dtype} "
                    f"{list(data.shape)} on {data.device}, while its optimizer holds state for it",
                    "Convert or move a model before its optimizer is made.",
                )
            view.copy_(data)
            slot.parameter.data = view
        if self._home is not self._weights:
            self._weights.copy_(self._home)

    def receive(self) -> None:
        """Set the gradients of the pieces; None if no rank has a gradient."""
        bucket, reduced = self.bucket, self.bucket.reduced
        assert reduced is not None
        for slot, offset, flag in zip(bucket.slots, bucket.layout.offsets, reduced.flags.tolist(), strict=True):
            if (piece := self.pieces.get(id(slot.parameter))) is not None:
                begin = offset + piece.start - reduced.start
                values = reduced.values[begin : begin + len(piece.weights)]
                piece.weights.grad = values.to(piece.weights) if flag != bucket.absent else None

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yield the gradients of the pieces."""
        for piece in self.pieces.values():
            if piece.weights.grad is not None:
                yield piece.weights.grad

    def by_group(self, numbers: dict[int, int]) -> dict[int, list[torch.Tensor]]:
        """Return the pieces that have a gradient, by the number of their parameter's group, which ``numbers`` has by
        its id.
        """
        found: dict[int, list[torch.Tensor]] = {}
        for key, piece in self.pieces.items():
            if piece.weights.grad is not None:
                found.setdefault(numbers[key], []).append(piece.weights)
        return found

    def send(self) -> None:
        """Start the allgather of this rank's weights and the weights of the others."""
        for piece in self.pieces.values():
            piece.weights.grad = None
        name = f"{self.bucket.name}{WEIGHTS}"
        self._handle = comm.allgather_into_async(self._weights, self._own, name=name, process_set=self._process_set)

    def arrive(self) -> None:
        """Wait for the weights of the others.

        Raises:
            PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.
        """
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        comm.synchronize(handle)
        if self._home is not self._weights:
            self._home.copy_(self._weights, non_blocking=True)
        # As in a plain optimizer's step: a later backward through the old weights must raise an error.
        torch.autograd.graph.increment_version([slot.parameter for slot in self.bucket.slots])

    def abandon(self) -> None:
        """Forget the operation in flight."""
        self._handle = None


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise RequestError unless ``optimizer`` is a known elementwise one of torch, or its class declares it."""
    cls = type(optimizer)
    known = [getattr(torch.optim, name).step for name in _ELEMENTWISE if hasattr(torch.optim, name)]
    own: Any = cls.step
    if not getattr(cls, "elementwise", any(inspect.unwrap(own) is inspect.unwrap(step) for step in known)):
        raise wrong_argument(
            "host_optimizer needs an optimizer that treats every element of a parameter by itself: "
            f"{', '.join(_ELEMENTWISE)}, or a class of yours that says so with `elementwise = True`. "
            f"Received: {cls.__name__}"
        )
    for option in ("differentiable", "capturable"):
        if any(group.get(option) for group in optimizer.param_groups):
            raise wrong_argument(f"host_optimizer cannot be combined with {option}=True of {cls.__name__}")


def unhooked_step(cls: type) -> Callable[..., Any]:
    """Return the ``step`` of an optimizer's class without torch's hook wrapper."""
    step: Any = cls.step  # type: ignore[attr-defined]
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    found: Callable[..., Any] = step
    return found


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
