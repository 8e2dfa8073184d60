"""Callbacks for ``model.fit(callbacks=)`` of Keras 3."""

from __future__ import annotations

from typing import Any

import keras

from horovod._keras import choice
from horovod._keras.callbacks import BestCheckpoint, Broadcast, Kit, MetricAverage, RateSchedule, RateWarmup
from horovod._keras.members import DistributedMembers
from horovod.bindings.missing import explain
from horovod.keras.loss_scale import innermost
from horovod.keras.values import broadcast_variables

__all__ = [
    "KIT",
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


def _reduction_of(optimizer: Any) -> Any:
    inner = innermost(optimizer)
    return inner._reduction if isinstance(inner, DistributedMembers) else None


def _build(optimizer: Any, variables: list[Any]) -> None:
    if not optimizer.built:
        optimizer.build(variables)


KIT = Kit(
    broadcast=broadcast_variables,
    is_variable=lambda value: isinstance(value, keras.Variable),
    reduction_of=_reduction_of,
    innermost=innermost,
    build=_build,
    refuses_xla=choice.of_name(keras.backend.backend()).refuses_xla,
)


class BroadcastGlobalVariablesCallback(Broadcast, keras.callbacks.Callback):
    """Gives all ranks the model and the optimizer of one before the first step; arguments as in ``Broadcast``."""

    _kit = KIT


class MetricAverageCallback(MetricAverage, keras.callbacks.Callback):
    """Averages metrics over all ranks at the end of each epoch; arguments as in ``MetricAverage``."""

    _kit = KIT


class LearningRateScheduleCallback(RateSchedule, keras.callbacks.Callback):
    """Multiplies the learning rate from one epoch on; arguments as in ``RateSchedule``."""

    _kit = KIT


class LearningRateWarmupCallback(RateWarmup, keras.callbacks.Callback):
    """Raises the learning rate from one process's to that of all; arguments as in ``RateWarmup``."""

    _kit = KIT


class BestModelCheckpoint(BestCheckpoint, keras.callbacks.ModelCheckpoint):
    """Keeps the best model in a file that rank 0 writes; arguments as in ``BestCheckpoint``."""


def __getattr__(name: str) -> Any:
    raise AttributeError(explain(f"keras.callbacks.{name}") or f"module {__name__!r} has no attribute {name!r}")
