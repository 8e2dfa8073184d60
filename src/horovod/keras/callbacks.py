"""Callbacks for ``model.fit(callbacks=)`` of Keras 3."""

from __future__ import annotations

from typing import Any

import keras

from horovod._keras.callbacks import Kit
from horovod._keras.public import derive_callbacks, of_name
from horovod.keras.optimizer import innermost
from horovod.keras.values import broadcast_variables

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


def _build(optimizer: Any, variables: list[Any]) -> None:
    if not optimizer.built:
        optimizer.build(variables)


KIT = Kit(
    backend=of_name(keras.backend.backend()),
    broadcast=broadcast_variables,
    is_variable=lambda value: isinstance(value, keras.Variable),
    innermost=innermost,
    build=_build,
)


(
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    BestModelCheckpoint,
) = derive_callbacks(KIT, keras.callbacks, __name__)
