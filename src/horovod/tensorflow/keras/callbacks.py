"""Callbacks for ``model.fit(callbacks=)`` of ``tf.keras``."""

import tensorflow as tf

from horovod._keras.callbacks import Kit
from horovod._keras.on_tensorflow import backend
from horovod._keras.public import derive_callbacks
from horovod.tensorflow.functions import broadcast_variables
from horovod.tensorflow.keras import legacy

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

if legacy.LEGACY:
    KIT = Kit(
        backend=backend,
        broadcast=broadcast_variables,
        is_variable=lambda value: isinstance(value, tf.Variable),
        innermost=legacy.innermost,
        build=legacy.build,
    )
else:
    from horovod.keras.callbacks import KIT

(
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    BestModelCheckpoint,
) = derive_callbacks(KIT, tf.keras.callbacks, __name__)
