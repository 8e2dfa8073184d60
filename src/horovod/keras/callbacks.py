"""Callbacks for ``model.fit(callbacks=)`` of Keras 3."""

from __future__ import annotations

from typing import Any

import keras

from horovod._keras.callbacks import Kit
from horovod._keras.members import DistributedMembers
from horovod._keras.public import derive_callbacks, of_name
from horovod.keras.optimizer import innermost
from horovod.keras.values import broadcast_variables

__all__ = [
    "ALL",
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
    refuses_xla=of_name(keras.backend.backend()).refuses_xla,
)


(
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    BestModelCheckpoint,
) = ALL = derive_callbacks(KIT, keras.callbacks, __name__)
