"""Keras datasets under PopDistStrategy: each replica takes whole batches, as with the SDK.

A script shards its data per instance and splits it into batches per replica. Keras passes a dataset to
``strategy.experimental_distribute_dataset``, which expects batches for all replicas together, and splits each.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils

import horovod.tensorflow as hvd
from khorovod_ipu.tensorflow.ring import RingCollectives

__all__ = ["prepare"]


def prepare() -> None:
    """Make the loaded versions of Keras pass whole batches to replicas; may be called repeatedly."""
    for name, owner, method, wrap in _WRAPPED:
        cls = getattr(sys.modules.get(name), owner, None)
        plain = vars(cls).get(method) if cls else None
        if plain is not None and not hasattr(plain, "_khorovod_wraps"):
            wrapped: Any = functools.wraps(plain)(wrap(plain))
            wrapped._khorovod_wraps = plain
            setattr(cls, method, wrapped)


def _of_keras_2(plain: Any) -> Any:
    def configure(self: Any, strategy: Any, x: Any, steps_per_epoch: Any, class_weight: Any, distribute: Any) -> None:
        if not (distribute and _is_wanted(strategy)):
            plain(self, strategy, x, steps_per_epoch, class_weight, distribute)
            return
        size, steps = self._adapter.get_size(), None
        if size is not None and steps_per_epoch is None:
            steps = _steps(strategy, size)

        def epochs_apart(dataset: Any) -> Any:
            # One dataset may serve all epochs: without this, an epoch's last step would take batches of the next epoch.
            if steps is None:
                return dataset
            return _padded(dataset, size, steps * len(strategy.extended.worker_devices) - size)

        with strategy.extended.whole_batches(epochs_apart):
            plain(self, strategy, x, steps_per_epoch, class_weight, distribute)
        if steps_per_epoch is None:
            # Keras would infer the number again at the beginning of each epoch of a Sequence.
            self._steps_per_epoch = self._inferred_steps = steps or _steps(strategy, self._inferred_steps)

    return configure


def _of_keras_3(plain: Any) -> Any:
    def init(self: Any, distribute_strategy: Any = None, *args: Any, **kwargs: Any) -> None:
        if not _is_wanted(distribute_strategy):
            plain(self, distribute_strategy, *args, **kwargs)
            return
        with distribute_strategy.extended.whole_batches():
            plain(self, distribute_strategy, *args, **kwargs)
        self.data_adapter = _Counted(self.data_adapter, _steps(distribute_strategy, self._num_batches))
        self._num_batches = self.data_adapter.num_batches

    return init


def _of_first_replica(plain: Any) -> Any:
    def build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        if iterator is None or not _is_wanted(self._distribute_strategy):
            plain(self, iterator, data_batch)
            return
        # Keras needs the shapes of one batch, and would average the batches of all replicas, which may differ in size.
        _, _, batches = next(iter(iterator))
        plain(self, None, distribute_utils.select_replica(0, next(batches)))

    return build


def _on_one_batch(plain: Any) -> Any:
    def on_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_wanted(strategy := self.distribute_strategy):
            return plain(self, *args, **kwargs)
        if (replicas := len(strategy.extended.worker_devices)) > 1:
            raise ValueError(
                f"{plain.__name__} takes one batch, and each of the {replicas} replicas of this instance takes whole "
                "batches. Pass a dataset to fit, evaluate or predict, or start poprun with one replica per instance"
            )
        with strategy.extended.whole_batches():
            return plain(self, *args, **kwargs)

    return on_batch


def _of_all_replicas(plain: Any) -> Any:
    def make(self: Any, step: Any) -> Any:
        extended = self.distribute_strategy.extended
        if not hasattr(extended, "takes_whole_batches"):
            return plain(self, step)
        if self.steps_per_execution > 1 and isinstance(extended._collectives, RingCollectives):
            raise ValueError(
                f"steps_per_execution={self.steps_per_execution}: Keras 3 cannot run several steps at once over gRPC, "
                "where TensorFlow loses the keys of its rings. Leave it out, or take IPUHorovodStrategy, or Keras 2"
            )

        def step_of_all(data: Any) -> Any:
            # Keras 3 reads metrics in each replica, where they are its own.
            replica: Any = tf.distribute.get_replica_context()
            return replica.merge_call(lambda _, logs: self._get_metrics_result_or_logs(logs), (step(data),))

        return plain(self, step_of_all)

    return make


def _of_outputs(plain: Any) -> Any:
    def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if _is_wanted(tf.distribute.get_strategy()):
            # Keras 3 counts a batch of unknown size once, and so an empty one as well.
            size = tf.shape(tf.nest.flatten(y_pred)[0])[0]
            for loss in self.metrics:
                loss.update_state = lambda value, sample_weight, own=loss: type(own).update_state(own, value, size)
        return plain(self, y_true, y_pred, sample_weight)

    return call


def _of_some_rows(plain: Any) -> Any:
    def moments(self: Any, inputs: Any, mask: Any) -> Any:
        found = plain(self, inputs, mask)
        if not _is_wanted(tf.distribute.get_strategy()):
            return found
        # As in Keras 2, an empty batch changes no statistics; Keras 3 alone would make them NaN.
        kept = (tf.cast(self.moving_mean, found[0].dtype), tf.cast(self.moving_variance, found[1].dtype))
        return [tf.where(tf.size(inputs) > 0, new, old) for new, old in zip(found, kept, strict=True)]

    return moments


def _padded(dataset: Any, batches: int, missing: int) -> Any:
    """Append empty batches to each epoch of a dataset of tuples."""

    def ended(number: Any, batch: Any) -> Any:
        empty = tf.data.Dataset.from_tensors(tf.nest.map_structure(lambda tensor: tensor[:0], batch))
        is_last = number % batches == batches - 1
        times = tf.where(is_last, tf.constant(missing, tf.int64), 0)
        return tf.data.Dataset.from_tensors(batch).concatenate(empty.repeat(times))

    return dataset.enumerate().flat_map(ended) if missing else dataset


def _is_wanted(strategy: Any) -> bool:
    return bool(getattr(getattr(strategy, "extended", None), "takes_whole_batches", False))


def _steps(strategy: Any, batches: int | None) -> int | None:
    """Return the steps per epoch that the instance with the most batches needs; None if one number is unknown."""
    replicas = len(strategy.extended.worker_devices)
    counts = hvd.allgather_object(batches, name="strategy.keras_batches")
    return None if None in counts else max(-(-count // replicas) for count in counts)


class _Counted:
    """A data adapter of Keras 3 whose number of batches is the number of steps."""

    def __init__(self, adapter: Any, num_batches: int | None) -> None:
        self._adapter = adapter
        self.num_batches = num_batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)


_KERAS_3 = "keras.src.backend.tensorflow.trainer"
#: The methods of Keras 2 and 3 that read data or metrics: module, class, method, and what wraps it.
_WRAPPED = (
    ("tf_keras.src.engine.data_adapter", "DataHandler", "_configure_dataset_and_inferred_steps", _of_keras_2),
    (_KERAS_3, "TFEpochIterator", "__init__", _of_keras_3),
    (_KERAS_3, "TensorFlowTrainer", "_maybe_symbolic_build", _of_first_replica),
    (_KERAS_3, "TensorFlowTrainer", "_make_function", _of_all_replicas),
    ("keras.src.trainers.compile_utils", "CompileLoss", "call", _of_outputs),
    ("keras.src.layers.normalization.batch_normalization", "BatchNormalization", "_moments", _of_some_rows),
    *(
        (module, owner, f"{use}_on_batch", _on_one_batch)
        for module, owner in ((_KERAS_3, "TensorFlowTrainer"), ("tf_keras.src.engine.training", "Model"))
        for use in ("train", "test", "predict")
    ),
)
