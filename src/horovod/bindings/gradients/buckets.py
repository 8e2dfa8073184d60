"""Buckets: gradients as views of one buffer that is reduced as a whole.

The buffers of host gradients lie in the arena, which all ranks of the host share: the allreduce of a
bucket is one pass over memory, and no gradient is copied in or out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod.bindings.gradients.adapter import GradientAdapter, GradSlot
from horovod.bindings.gradients.collective import BucketCollective, Reduced
from horovod.bindings.gradients.layout import BucketLayout
from horovod.bindings.gradients.settings import ReduceSettings
from horovod.bindings.misuse import changed_gradient
from horovod.core.requests import ReduceOp
from horovod.phrases import few

__all__ = ["Bucket"]

# Presence flags (absent, present): the reduced flag differs from ``absent`` if at least one rank's flag does.
_FLAGS = {ReduceOp.MIN: (0.0, -1.0), ReduceOp.PRODUCT: (1.0, 0.0)}


class Bucket:
    """Slots whose gradients are reduced together.

    Args:
        name: name of its reduction, the same on all ranks.
        layout: positions of the slots' gradients in the buffer.
        slots: in the order of the layout.
        settings: how to reduce.
        adapter: the framework.
        collective: how it travels.

    Attributes:
        layout: positions of the slots' gradients in the buffer.
        in_flight: whether a reduction was started and not yet waited for.
        absent: flag of a gradient that no rank had.
        reduced: result of the last reduction; None while there is none.
    """

    def __init__(
        self, name: str, layout: BucketLayout, slots: Sequence[GradSlot], settings: ReduceSettings,
        adapter: GradientAdapter, collective: BucketCollective,
    ) -> None:  # fmt: skip
        self.name = name
        self.slots = tuple(slots)
        self.incomplete = len(self.slots)
        self.in_flight = False
        self.pending: Any = None
        self.layout = layout
        self._adapter = adapter
        self._collective = collective
        self.absent, self._present = _FLAGS.get(settings.op, (0.0, 1.0))
        self._version = 0
        first = self.slots[0].parameter
        self._buffer = adapter.zeros(layout.count, first)
        self._flags = self._buffer[layout.flags :]
        self._missing: list[int] = []
        self.reduced: Reduced | None = None
        wire_dtype = settings.wire_dtype(adapter.dtype(first))
        self._wire = self._buffer if wire_dtype is None else adapter.zeros(layout.count, first, wire_dtype)
        for slot, offset in zip(self.slots, layout.offsets, strict=True):
            slot.bucket = self
            slot.home = adapter.view(self._buffer, offset, slot.parameter)
            with adapter.quietly():
                adapter.adopt(slot)

    def submit(self) -> None:
        """Start the reduction; every gradient is present."""
        self._adapter.fill(self._flags, self._present)
        self._begin()

    def submit_incomplete(self) -> None:
        """Start the reduction with zeros for missing gradients."""
        flags = []
        for index, slot in enumerate(self.slots):
            present = self._adapter.adopt(slot)
            if not present:
                self._adapter.fill(slot.home, 0.0)
                self._missing.append(index)
            flags.append(self._present if present else self.absent)
        self._adapter.write(self._flags, flags)
        self._begin()

    def _begin(self) -> None:
        if self._wire is not self._buffer:
            self._adapter.copy(self._wire, self._buffer)
        self._version = self._adapter.version(self._buffer)
        self.reduced = None
        # Writes of the engine must not count as changes by the user.
        wire, names = self._adapter.unwatched(self._wire), [slot.name for slot in self.slots]
        self.pending = self._collective.begin(wire, self.layout, self.name, names)
        self.in_flight = True

    def finish(self) -> None:
        """Wait for the reduction; set gradients of parameters that had one on other ranks only.

        Raises:
            OptimizerUseError: a gradient was changed or replaced while it was being reduced.
        """
        pending, self.pending, in_flight, self.in_flight = self.pending, None, self.in_flight, False
        changed = self.changed()
        missing, self._missing = self._missing, []
        if not in_flight:
            return
        self.reduced = reduced = self._collective.wait(pending)
        if changed:
            raise changed_gradient(changed, self._collective.instead)
        if not reduced.in_place:
            return
        if self._wire is not self._buffer:
            self._adapter.copy(self._buffer, self._wire)
        if missing:
            flags = self._adapter.read(self._flags)
            for index in missing:
                if flags[index] != self.absent:
                    self._adapter.give(self.slots[index])
        for slot in self.slots:
            if slot.sparse_dim and self._adapter.lies_in_bucket(slot):
                self._adapter.make_sparse(slot)

    def changed(self) -> str:
        """Return the names of parameters whose gradient was changed since ``submit``; empty if there are none."""
        if self._adapter.version(self._buffer) != self._version:
            return f"one of {few([slot.name for slot in self.slots])}"
        for slot in self.slots:
            if self._adapter.gradient(slot.parameter) is not None and not self._adapter.lies_in_bucket(slot):
                return slot.name
        return ""

    def abandon(self) -> None:
        """Forget the operation in flight."""
        self.pending, self.in_flight = None, False
        self._missing = []
