"""Gradients as views of one buffer that is reduced as a whole.

The buffers of host gradients lie in the arena, where all ranks of the host reach them: the allreduce of a
bucket is one pass over memory, and no gradient is copied in or out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from horovod.bindings.buckets import BucketLayout
from horovod.bindings.compression import CastCompressor
from horovod.bindings.misuse import out_of_turn
from horovod.bindings.process_sets import ProcessSet
from horovod.core.requests import ReduceOp
from horovod.phrases import few
from horovod.torch.compression import Compressor, NoneCompressor
from horovod.torch.optimizer_state import dense_stride
from horovod.torch.runtime import comm

__all__ = ["Bucket", "Settings", "Slot"]

# Presence flags (absent, present), such that the reduced flag is not ``absent`` as soon as one rank's is not.
_FLAGS = {ReduceOp.MIN: (0.0, -1.0), ReduceOp.PRODUCT: (1.0, 0.0)}


@dataclass(frozen=True)
class Settings:
    """How gradients are reduced.

    Attributes:
        op: how they are combined.
        prescale: multiplies them before.
        postscale: multiplies them after.
        compression: how they are sent.
        process_set: who takes part.
        sparse_as_dense: whether sparse gradients travel as dense ones.
    """

    op: ReduceOp
    prescale: float
    postscale: float
    compression: type[Compressor]
    process_set: ProcessSet
    sparse_as_dense: bool

    @property
    def travel_alone(self) -> bool:
        """Whether the user's own compressor wants to see gradients one by one."""
        return self.compression is not NoneCompressor and not self._casts

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return what gradients of ``dtype`` are cast to before they are sent, or ``None``."""
        compression: Any = self.compression
        return compression.wire_dtype if self._casts and dtype in compression.from_dtypes else None

    @property
    def _casts(self) -> bool:
        # A user's compressor may be an object that only has the two functions.
        return isinstance(self.compression, type) and issubclass(self.compression, CastCompressor)

    def start(self, tensor: torch.Tensor, name: str) -> int:
        """Start the reduction of ``tensor`` in place and return its handle."""
        return comm.allreduce_async_(
            tensor,
            name=name,
            op=self.op,
            prescale_factor=self.prescale,
            postscale_factor=self.postscale,
            process_set=self.process_set,
        )


@dataclass(eq=False)
class Slot:
    """One parameter and where its gradient goes.

    Attributes:
        parameter: the parameter.
        name: its name.
        passes_left: backward passes until its gradient is complete.
        arrival: when its gradient became ready in the first step, for the order of buckets.
        bucket: where it travels, or ``None`` before the ranks have agreed, and when it travels alone.
        view: its part of the bucket's buffer.
        sparse_dim: number of sparse dimensions of its gradient; 0 for a dense one.
        alone: it travels alone.
        pending: what is in flight, for a gradient that travels alone.
    """

    parameter: torch.Tensor
    name: str
    passes_left: int
    arrival: int = -1
    bucket: Bucket | None = None
    view: torch.Tensor | None = None
    sparse_dim: int = 0
    alone: bool = False
    pending: Any = field(default=None, repr=False)

    def reset(self, passes: int) -> None:
        """Forget everything but the parameter and its gradient."""
        self.passes_left, self.arrival = passes, -1
        self.bucket = self.view = self.pending = None
        self.sparse_dim, self.alone = 0, False

    def adopt(self, view: torch.Tensor) -> bool:
        """Make the gradient, if there is one, lie in ``view``; return whether there is one."""
        grad = self.parameter.grad
        if grad is view:
            return True
        if grad is None:
            return False
        if grad.requires_grad:
            grad = grad.detach()
        if grad.layout is not torch.strided:
            self.sparse_dim = self.sparse_dim or grad.sparse_dim()
            grad = grad.to_dense()
        view.copy_(grad)
        self.parameter.grad = view
        return True


class Bucket:
    """Slots that travel together.

    Args:
        name: the name of its allreduce, the same on all ranks.
        layout: where the slots' gradients lie.
        slots: in the order of the layout.
        settings: how to reduce.
    """

    def __init__(self, name: str, layout: BucketLayout, slots: Sequence[Slot], settings: Settings) -> None:
        self.name = name
        self.slots = tuple(slots)
        self.incomplete = len(self.slots)
        self.handle: int | None = None
        self._settings = settings
        self._absent, self._present = _FLAGS.get(settings.op, (0.0, 1.0))
        self._version = 0
        first = self.slots[0].parameter
        self._buffer = _zeros(layout.count, first.dtype, first.device)
        self._flags = self._buffer[layout.flags :]
        self._missing: list[int] = []
        wire_dtype = settings.wire_dtype(first.dtype)
        self._wire = _zeros(layout.count, wire_dtype, first.device) if wire_dtype is not None else self._buffer
        for slot, offset in zip(self.slots, layout.offsets, strict=True):
            slot.bucket = self
            slot.view = self._view(slot.parameter, offset)
            with torch.no_grad():
                slot.adopt(slot.view)

    def _view(self, parameter: torch.Tensor, offset: int) -> torch.Tensor:
        """Return the gradient's place, with the strides that optimizers like best: the parameter's own."""
        flat = self._buffer[offset : offset + parameter.numel()]
        return flat.as_strided(parameter.shape, dense_stride(parameter), flat.storage_offset())

    def submit(self) -> None:
        """Start the reduction; every gradient is there."""
        self._flags.fill_(self._present)
        self._start()

    def submit_incomplete(self) -> None:
        """Start the reduction with zeros for the gradients that are not there."""
        flags = []
        for index, slot in enumerate(self.slots):
            view = slot.view
            assert view is not None
            present = slot.adopt(view)
            if not present:
                view.zero_()
                self._missing.append(index)
            flags.append(self._present if present else self._absent)
        self._flags.copy_(torch.tensor(flags, dtype=self._flags.dtype, device=self._flags.device))
        self._start()

    def _start(self) -> None:
        if self._wire is not self._buffer:
            self._wire.copy_(self._buffer)
        self._version = self._buffer._version
        # .data has a version of its own: what the engine writes is no change by the user.
        self.handle = self._settings.start(self._wire.data, self.name)

    def finish(self) -> None:
        """Wait for the reduction; give gradients to parameters that had none here but had one elsewhere.

        Raises:
            OptimizerUseError: a gradient was changed or replaced while it was being reduced.
        """
        handle, self.handle = self.handle, None
        changed = self._changed_in_flight()
        missing, self._missing = self._missing, []
        if handle is not None:
            comm.synchronize(handle)
        if changed:
            raise out_of_turn(
                f"the gradient of {changed} was changed after backward() had handed it to the other ranks",
                "To clip or unscale gradients, call optimizer.synchronize() first, and then optimizer.step() inside "
                "`with optimizer.skip_synchronize():`.",
            )
        if self._wire is not self._buffer:
            self._buffer.copy_(self._wire)
        if missing:
            flags = self._flags.tolist()
            for index in missing:
                if flags[index] != self._absent:
                    self.slots[index].parameter.grad = self.slots[index].view
        for slot in self.slots:
            if slot.sparse_dim and slot.parameter.grad is slot.view and slot.view is not None:
                slot.parameter.grad = slot.view.to_sparse(slot.sparse_dim)

    def _changed_in_flight(self) -> str:
        """Name the parameters whose gradient somebody touched since ``submit``."""
        if self._buffer._version != self._version:
            return f"one of {few([slot.name for slot in self.slots])}"
        for slot in self.slots:
            grad = slot.parameter.grad
            if grad is not slot.view and grad is not None:
                return slot.name
        return ""

    def abandon(self) -> None:
        """Forget what is in flight."""
        self.handle = None
        self._missing = []


def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        shared: torch.Tensor = comm.zeros(count, dtype=dtype)
        return shared
    return torch.zeros(count, dtype=dtype, device=device)
