"""All code of this package that depends on Keras' internals, with a fallback for each part."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

__all__ = ["accumulated_gradients", "end_epoch_of_data", "passes", "set_back", "velocities"]


def accumulated_gradients(optimizer: Any) -> Sequence[Any]:
    """Return the variables in which an optimizer adds up gradients between two updates; none where it has no such."""
    found: Sequence[Any] = getattr(optimizer, "_accumulated_gradients", ())
    return found


def passes(optimizer: Any) -> tuple[int, int]:
    """Return the number of passes that an optimizer has done, and at its last update; 0 if it adds up no gradients."""
    every: Any = getattr(optimizer, "gradient_accumulation_steps", None)
    if not every:
        return 0, 0
    done = int(optimizer._iterations)
    return done, done - done % every


def set_back(optimizer: Any, count: int) -> None:
    """Lower the number of passes that an optimizer has done."""
    optimizer._iterations.assign(optimizer._iterations - count)


def end_epoch_of_data() -> None:
    """Tell the data of the calling ``fit()`` that its epoch has ended, which Keras does only after the last batch.

    Without that, or where Keras keeps its data elsewhere, a ``PyDataset`` refuses to begin the next epoch. Data of
    known length begin again: with ``steps_per_epoch``, the next epoch would else get only the batches that are left.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        iterator: Any = frame.f_locals.get("epoch_iterator")
        adapter = getattr(iterator, "data_adapter", None)
        if adapter is not None:
            if adapter.num_batches:
                iterator._current_iterator = None
            adapter.on_epoch_end()
            return
        frame = frame.f_back


def velocities(optimizer: Any) -> list[Any]:
    """Return the variables in which an optimizer with momentum adds up its updates; none before its first step."""
    found = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None)
    if not found:  # tf_keras' legacy optimizers
        found = [slots.get("momentum") for slots in getattr(optimizer, "_slots", {}).values()]
    return [velocity for velocity in found if velocity is not None]
