"""Batch normalization with the statistics of all ranks' batches."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod import context
from horovod.bindings.process_sets import ProcessSet, global_process_set, id_or_none
from horovod.bindings.reductions import Reduction
from horovod.bindings.submission import id_of
from horovod.core.requests import ReduceOp
from horovod.tensorflow import collectives

__all__ = ["SyncBatchNormalization"]


@tf.keras.utils.register_keras_serializable(package="horovod")
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """Batch normalization over the batches of all ranks, as if they were one.

    Inputs may have any batch size, different between ranks and even 0, if all ranks together have at least one sample.
    In evaluation, and with one rank, it is plain batch normalization. Each layer does one collective in forward and one
    in backward, of sums in float64, to avoid cancellation.

    Ranks match layers by name. Keras numbers layers without a name; pass ``name`` if some ranks make more than others.

    Args:
        fused: must be False.
        process_set: ranks that take part.
        **kwargs: arguments of Keras' BatchNormalization.

    Raises:
        ValueError: ``fused`` is not False, or ``process_set`` is not a process set.
    """

    def __init__(self, fused: bool | None = False, process_set: ProcessSet = global_process_set, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        if not kwargs.get("name"):
            kwargs["name"] = None
        super().__init__(**kwargs)
        # Otherwise tf_keras uses an image kernel that never calls ``_moments``.
        self.fused = False
        id_or_none(process_set)
        self.process_set = process_set

    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return mean and variance; Keras 3 passes the mask, tf_keras the axes and ``keep_dims``."""
        # In an elastic job, a function traced with one rank may later run with several.
        if not context.is_initialized() or (self.process_set.size() == 1 and not context.is_elastic()):
            return super()._moments(inputs, *args, **kwargs)
        id_of(self.process_set)  # an error if it is not registered
        names = ("mask",) if hasattr(self, "_reduction_axes") else ("reduction_axes", "keep_dims", "mask")
        given = dict(zip(names, args, strict=False)) | kwargs
        axes = list(given.get("reduction_axes") or self._reduction_axes)
        keep, mask = given.get("keep_dims", False), given.get("mask")
        mean, variance = self._over_all(inputs, axes, mask)
        if keep:
            shape = [1 if axis in axes else -1 for axis in range(inputs.shape.rank)]
            mean, variance = tf.reshape(mean, shape), tf.reshape(variance, shape)
        return mean, variance

    def _over_all(self, inputs: Any, axes: list[int], mask: Any) -> tuple[Any, Any]:
        dtype = tf.float32 if inputs.dtype in (tf.float16, tf.bfloat16) else inputs.dtype
        values = tf.cast(inputs, dtype)
        weights = tf.ones_like(values)
        if mask is not None:
            weights *= tf.cast(tf.expand_dims(mask, -1), dtype)
        count = tf.reduce_sum(weights, axes)
        mean = tf.math.divide_no_nan(tf.reduce_sum(values * weights, axes), count)
        shape = [1 if axis in axes else -1 for axis in range(inputs.shape.rank)]
        deviations = tf.reduce_sum(weights * tf.square(values - tf.reshape(mean, shape)), axes)
        # Without a row for each rank, whose number XLA would fix.
        count, mean, deviations = (tf.cast(each, tf.float64) for each in (count, mean, deviations))
        own = tf.stack([count, count * mean, count * tf.square(mean) + deviations])
        how, name = Reduction(ReduceOp.SUM, process_set=self.process_set), f"sync_batch_norm.{self.name}"
        (sums,) = collectives.allreduce([own], how, name, ignore_name_scope=True)
        mean, square = tf.unstack(tf.math.divide_no_nan(sums[1:], sums[:1]))
        return tf.cast(mean, dtype), tf.cast(tf.maximum(square - tf.square(mean), 0), dtype)
