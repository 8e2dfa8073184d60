"""Callbacks for ``model.fit(callbacks=)`` of ``tf.keras``."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod._keras.callbacks import Kit
from horovod._keras.members import Distributed
from horovod._keras.on_tensorflow import backend
from horovod._keras.public import derive_callbacks
from horovod.tensorflow.functions import broadcast_variables
from horovod.tensorflow.keras import legacy

if not legacy.LEGACY:
    from horovod.keras import callbacks as modern

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


def _legacy_kit() -> Kit:
    def reduction_of(optimizer: Any) -> Any:
        inner = legacy.innermost(optimizer)
        return inner._reduction if isinstance(inner, Distributed) else None

    return Kit(
        broadcast=broadcast_variables,
        is_variable=lambda value: isinstance(value, tf.Variable),
        reduction_of=reduction_of,
        innermost=legacy.innermost,
        build=legacy.build,
        refuses_xla=backend.refuses_xla,
    )


KIT = _legacy_kit() if legacy.LEGACY else modern.KIT


(
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    BestModelCheckpoint,
) = derive_callbacks(KIT, tf.keras.callbacks, __name__) if legacy.LEGACY else modern.ALL
