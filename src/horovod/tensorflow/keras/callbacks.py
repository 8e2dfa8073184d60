"""Callbacks for ``model.fit(callbacks=)`` of ``tf.keras``."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod._keras.callbacks import BestCheckpoint, Broadcast, Kit, MetricAverage, RateSchedule, RateWarmup
from horovod._keras.members import Distributed
from horovod._keras.on_tensorflow import backend
from horovod.bindings.missing import explain
from horovod.tensorflow.functions import broadcast_variables
from horovod.tensorflow.keras.kind import LEGACY

if LEGACY:
    from horovod.tensorflow.keras import legacy
else:
    from horovod.keras import callbacks as modern

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


def _reduction_of(optimizer: Any) -> Any:
    inner = legacy.innermost(optimizer)
    return inner._reduction if isinstance(inner, Distributed) else None


if LEGACY:
    _KIT = Kit(
        broadcast=broadcast_variables,
        is_variable=lambda value: isinstance(value, tf.Variable),
        reduction_of=_reduction_of,
        innermost=legacy.innermost,
        build=legacy.build,
        refuses_xla=backend.refuses_xla,
    )
else:
    _KIT = modern.KIT


class BroadcastGlobalVariablesCallback(Broadcast, tf.keras.callbacks.Callback):
    """Gives all ranks the model and the optimizer of one before the first step; arguments as in ``Broadcast``."""

    _kit = _KIT


class MetricAverageCallback(MetricAverage, tf.keras.callbacks.Callback):
    """Averages metrics over all ranks at the end of each epoch; arguments as in ``MetricAverage``."""

    _kit = _KIT


class LearningRateScheduleCallback(RateSchedule, tf.keras.callbacks.Callback):
    """Multiplies the learning rate from one epoch on; arguments as in ``RateSchedule``."""

    _kit = _KIT


class LearningRateWarmupCallback(RateWarmup, tf.keras.callbacks.Callback):
    """Raises the learning rate from one process's to that of all; arguments as in ``RateWarmup``."""

    _kit = _KIT


class BestModelCheckpoint(BestCheckpoint, tf.keras.callbacks.ModelCheckpoint):
    """Keeps the best model in a file that rank 0 writes; arguments as in ``BestCheckpoint``."""


def __getattr__(name: str) -> Any:
    raise AttributeError(
        explain(f"tensorflow.keras.callbacks.{name}") or f"module {__name__!r} has no attribute {name!r}"
    )
