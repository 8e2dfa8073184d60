"""The public callbacks of each Keras, derived from one source."""

from __future__ import annotations

from typing import Any

from horovod._keras.callbacks import BestCheckpoint, Broadcast, Kit, MetricAverage, RateSchedule, RateWarmup

__all__ = ["derive"]


def derive(kit: Kit, callbacks: Any, module: str) -> tuple[Any, ...]:
    """Return the five public callbacks for a kind of Keras.

    Args:
        kit: what this Keras offers.
        callbacks: its module of callbacks.
        module: where the classes are defined.
    """
    kinds = (
        ("BroadcastGlobalVariablesCallback", Broadcast, callbacks.Callback),
        ("MetricAverageCallback", MetricAverage, callbacks.Callback),
        ("LearningRateScheduleCallback", RateSchedule, callbacks.Callback),
        ("LearningRateWarmupCallback", RateWarmup, callbacks.Callback),
        ("BestModelCheckpoint", BestCheckpoint, callbacks.ModelCheckpoint),
    )
    return tuple(
        type(name, (ours, base), {"__module__": module, "__doc__": ours.__doc__, "_kit": kit})
        for name, ours, base in kinds
    )
