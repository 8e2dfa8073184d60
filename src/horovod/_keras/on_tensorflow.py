"""Keras on TensorFlow: gradients are reduced inside the traced step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from horovod import context
from horovod._keras.backends import Backend, Compare, Order
from horovod.bindings.process_sets import ProcessSet
from horovod.bindings.reductions import Reduction
from horovod.tensorflow import ops as hvd
from horovod.tensorflow.collectives import members_of, speaks_tensorflow
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.failures import typed_errors
from horovod.tensorflow.first_step import tensorflows
from horovod.tensorflow.held import array_of, changes_all, hold, put
from horovod.tensorflow.reducing import described, together
from horovod.tensorflow.runtime import comm

__all__ = ["backend"]


class _TensorFlow(Backend):
    """See ``Backend``."""

    name = "tensorflow"
    hvd = hvd
    comm = comm
    compression = Compression
    together = staticmethod(together)
    typed = staticmethod(typed_errors)
    changes_all = staticmethod(changes_all)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], order: Order) -> list[Any]:
        found = list(gradients)
        there = [index for index, gradient in enumerate(found) if gradient is not None]
        if order.sparse_as_dense:
            for index in there:
                found[index] = tf.convert_to_tensor(found[index])
        # Reduce dense and sparse gradients as one operation each; sparse ones are scaled after the reduction.
        sparse = [index for index in there if isinstance(found[index], tf.IndexedSlices)]
        parts = described(found)
        self._reduce(found, [index for index in there if index not in sparse], order.name, order, parts, True)
        self._reduce(found, sparse, f"{order.name}.sparse", order, parts, False)
        return found

    @speaks_tensorflow
    def _reduce(self, found: list[Any], which: Sequence[int], name: str, order: Order, parts: str, dense: bool) -> None:
        if not which:
            return
        factors = (order.prescale, order.postscale) if dense else (1.0, 1.0)
        how = Reduction(order.op, *factors, order.process_set)
        reduced = hvd.combined([found[index] for index in which], how, order.compression, name, True, parts)
        for index, gradient in zip(which, reduced, strict=True):
            found[index] = gradient if dense else self.scale(gradient, order.prescale * order.postscale)

    def outside(self) -> AbstractContextManager[Any]:
        scope: AbstractContextManager[Any] = tf.init_scope()
        return scope

    def scale(self, gradient: Any, factor: Any) -> Any:
        if isinstance(factor, float) and factor == 1.0:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
        # Use tf.constant: tf.cast() of a Python number would go through float32.
        return gradient * (
            tf.cast(factor, gradient.dtype) if tf.is_tensor(factor) else tf.constant(factor, gradient.dtype)
        )

    def members(self, process_set: ProcessSet) -> Any:
        return tf.cast(members_of(process_set), tf.float32) if context.is_elastic() else process_set.size() or 1

    def hold(self, variables: Sequence[Any]) -> list[Any]:
        return hold([tensorflows(variable) for variable in variables])

    def put(self, variables: Sequence[Any], held: Sequence[Any]) -> None:
        put([tensorflows(variable) for variable in variables], held)

    def array(self, variable: Any) -> Any:
        return array_of(tensorflows(variable))

    def refuses_xla(self) -> bool:
        # Only XLA programs for the CPU can call back; for other devices Keras turns XLA on by default.
        return any(device.device_type != "CPU" for device in tf.config.list_physical_devices())

    def first_step(self, variables: Sequence[Any], act: Callable[[], None], compare: Compare) -> bool:
        # While the step is traced, existing variables have their values from before the step. Variables created by
        # the trace, as in a Sequential without an Input, have no values; TensorFlow then traces a second time.
        with tf.init_scope():
            values = [tensorflows(variable) for variable in variables]
            if tf.executing_eagerly() and not all(bool(value.is_initialized()) for value in values):
                return False
            act()
            if tf.executing_eagerly():
                compare(lambda: [tf.convert_to_tensor(value).numpy() for value in values])
        return True


backend: Backend = _TensorFlow()
