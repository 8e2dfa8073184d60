"""The public callbacks of each Keras, derived from one source."""

from __future__ import annotations

from typing import Any

from horovod._keras.callbacks import BestCheckpoint, Broadcast, Kit, MetricAverage, RateSchedule, RateWarmup

__all__ = ["derive"]


def derive(kit: Kit, callbacks: Any, module: str) -> tuple[Any, ...]:
    """Return the five public callback classes for one kind of Keras.

    Args:
        kit: functions of this Keras.
        callbacks: its module of callbacks.
        module: name of the module that defines the classes.
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
