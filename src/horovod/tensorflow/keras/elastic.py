"""Elastic training with ``tf.keras``: ``hvd.elastic``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from horovod._keras.elastic_fit import FitKit, fit
from horovod._keras.on_tensorflow import backend
from horovod._keras.public import derive_elastic
from horovod.bindings.elastic import common_names
from horovod.bindings.elastic.common_names import *  # noqa: F403 - all of it, by its own list
from horovod.bindings.elastic.step import decorators
from horovod.tensorflow.keras.callbacks import KIT
from horovod.tensorflow.keras.legacy import LEGACY
from horovod.tensorflow.shards import shard

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "fit",
    "run",
    "shard",
    "step",
]
__all__ += common_names.__all__


def _convert(batch: Any) -> Any:
    def tensor(value: Any) -> Any:
        made = tf.convert_to_tensor(value)
        return tf.cast(made, tf.keras.backend.floatx()) if made.dtype == tf.float64 else made

    return tf.nest.map_structure(lambda value: None if value is None else tensor(value), batch)


def _make_function(model: Any) -> Callable[[list[Any]], Any]:
    """Return a train function like that of tf_keras' ``make_train_function``, for batches instead of an iterator."""

    def run_step(data: Any) -> Any:
        outputs = model.train_step(data)
        with tf.control_dependencies([found for found in tf.nest.flatten(outputs) if tf.is_tensor(found)]):
            model._train_counter.assign_add(1)
        return outputs

    if not model.run_eagerly:
        run_step = tf.function(run_step, reduce_retracing=True, jit_compile=model.jit_compile or None)
    return lambda batches: [run_step(batch) for batch in batches][-1]


@contextmanager
def _installed(model: Any, call: Callable[[], Any]) -> Iterator[None]:
    function = lambda iterator: call()  # noqa: E731
    model.make_train_function = lambda force=False: function
    model.train_function = None
    try:
        yield
    finally:
        del model.make_train_function
        model.train_function = None


def _present(model: Any, sample: Any) -> Any:
    return model.get_metrics_result()  # tf_keras reports metrics that it has not built yet


if LEGACY:
    from tf_keras.src.callbacks import CallbackList

    FIT_KIT = FitKit(CallbackList, _convert, _make_function, _present, _installed, shard, sys.maxsize)
else:
    from horovod.keras.elastic import FIT_KIT

KerasState, CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback = derive_elastic(
    KIT, FIT_KIT, tf.keras.callbacks, __name__
)
run, step = decorators(backend.typed)
