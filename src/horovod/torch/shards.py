"""One rank's share of a bucket's weights, which only that rank steps; all weights of a bucket share an arena buffer.

The parameters of a CPU model are views of that buffer: weights received from other ranks need no further copy.
Weights of a device are also kept on the host, and copied to the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from horovod.bindings.gradients.buckets import Bucket
from horovod.bindings.gradients.gradient_slots import GradSlot
from horovod.bindings.gradients.names import WEIGHTS
from horovod.bindings.misuse import out_of_turn
from horovod.bindings.process_sets import ProcessSet
from horovod.torch.optimizer_methods import gradients
from horovod.torch.runtime import comm

__all__ = ["Shard", "WeightPiece"]


@dataclass(eq=False)
class WeightPiece:
    """The part of one parameter that this rank steps.

    Attributes:
        slot: slot of the parameter.
        start: index of the first element, in the parameter's memory order.
        weights: the elements; a view of the buffer.
    """

    slot: GradSlot
    start: int
    weights: torch.Tensor


class Shard:
    """This rank's share of a bucket.

    Args:
        bucket: the bucket.
        process_set: the ranks that share the bucket.

    Attributes:
        pieces: this rank's part of each parameter, by the parameter's id; many parameters have none.
    """

    def __init__(self, bucket: Bucket, process_set: ProcessSet) -> None:
        self.bucket = bucket
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
        for piece in self.pieces.values():
            piece.weights.grad = None
        for part in self.bucket.shard_parts():
            weights = self.pieces[id(part.slot.parameter)].weights
            weights.grad = part.values.to(weights)

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yield the gradients of the pieces."""
        for piece in self.pieces.values():
            if piece.weights.grad is not None:
                yield piece.weights.grad

    def by_group(self, numbers: dict[int, int]) -> dict[int, list[torch.Tensor]]:
        """Return the pieces that have a gradient, by the number of their parameter's group.

        Args:
            numbers: number of the group, by the parameter's id.
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
            PeerLostError: a rank died.
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
