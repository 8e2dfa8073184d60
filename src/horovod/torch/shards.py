"""One rank's share of a bucket's weights, which it alone steps; all weights of a bucket lie in one buffer of the arena.

The parameters of a CPU model are views of that buffer: what the other ranks send of theirs needs no further copy.
Weights of a device are kept on the host as well, and copied there.
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
        slot: whose.
        start: the first of its elements, in the order in which the parameter lies in memory.
        weights: them; part of the buffer.
    """

    slot: GradSlot
    start: int
    weights: torch.Tensor


class Shard:
    """This rank's share of a bucket.

    Args:
        bucket: which.
        process_set: the ranks that share it.

    Attributes:
        pieces: what it has of each parameter, by the parameter's id; of many it has nothing.
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
        """Make the parameters lie in the buffer, also those that somebody has given other memory since.

        Raises:
            OptimizerUseError: a parameter is of another dtype, shape or device now.
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
        """Give the pieces their gradients; those that no rank has a gradient for get none."""
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
        """Return the pieces that have a gradient, by the number of the group that their parameter is in.

        Args:
            numbers: the groups' numbers, by the parameter's id.
        """
        found: dict[int, list[torch.Tensor]] = {}
        for key, piece in self.pieces.items():
            if piece.weights.grad is not None:
                found.setdefault(numbers[key], []).append(piece.weights)
        return found

    def send(self) -> None:
        """Begin to give this rank's weights to the others, and to get theirs."""
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
        # A plain optimizer does the same: backward through values of the old weights is an error.
        torch.autograd.graph.increment_version([slot.parameter for slot in self.bucket.slots])

    def abandon(self) -> None:
        """Forget what is in flight."""
        self._handle = None
