"""Several backward passes per step: gradients are accumulated locally, and reduced in the last pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.collectives import members_of
from horovod.tensorflow.reducing import divided, key_of
from horovod.tensorflow.sparse import densified

__all__ = ["LocalGradientAggregationHelper", "LocalGradientAggregationHelperEager", "after"]


class LocalGradientAggregationHelperEager:
    """Accumulates gradients, in eager mode and in graphs.

    Args:
        backward_passes_per_step: number of passes per step.
        allreduce_func: ``fn(gradients, variables)``, which reduces gradients over all ranks.
        sparse_as_dense: whether IndexedSlices become dense; sparse ones cannot be accumulated.
        average_aggregated_gradients: whether to divide the sums by the number of passes.
        process_set: ranks that take part.
        scale_local_gradients: whether to divide the gradients of local variables by the number of ranks.

    Raises:
        ValueError: ``backward_passes_per_step`` is less than 1.
    """

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[..., Sequence[Any]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        if backward_passes_per_step <= 0:
            raise ValueError(f"backward_passes_per_step must be > 0. Received: {backward_passes_per_step}")
        self.backward_passes_per_step = backward_passes_per_step
        self.allreduce_grads = allreduce_func
        self.sparse_as_dense = sparse_as_dense
        self.average_aggregated_gradients = average_aggregated_gradients
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        #: Number of passes done in the present step.
        self.counter: Any = None
        self._sums: dict[int, Any] = {}  # by variable: a later step may have others, or another order
        self._local: dict[int, Any] = {}

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of a variable local to this rank.

        Args:
            var: the variable.
        """
        self._local[key_of(var)] = var

    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Add gradients to those of the step's earlier passes; reduce the sums in the last pass.

        Args:
            grads: gradients of this pass; None stays None.
            vars: variables of the gradients.

        Returns:
            The reduced gradients in the last pass of a step; the sums so far in earlier passes.

        Raises:
            ValueError: a gradient is IndexedSlices, which cannot be accumulated.
        """
        dense = [self._dense(grad) for grad in grads]
        if self.backward_passes_per_step == 1:
            return self._reduce(dense, vars)
        self._prepare(dense, vars)
        present = [index for index, grad in enumerate(dense) if grad is not None]
        added = [self._sums[key_of(vars[index])].assign_add(dense[index]) for index in present]
        with after(added):
            passes = self.counter.assign_add(1)
        found = tf.cond(
            tf.equal(passes, self.backward_passes_per_step),
            lambda: self._communicate(present, vars),
            lambda: [tf.identity(total) for total in added],
        )
        results: list[Any] = list(dense)
        for index, grad in zip(present, found if isinstance(found, list | tuple) else [found], strict=True):
            results[index] = grad
        return results

    def _dense(self, grad: Any) -> Any:
        if isinstance(grad, tf.IndexedSlices) and not self.sparse_as_dense:
            if self.backward_passes_per_step == 1:
                return grad
            raise ValueError(
                "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False; "
                "pass sparse_as_dense=True"
            )
        return densified(grad)

    def _prepare(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        with tf.init_scope():
            if self.counter is None:
                self.counter = tf.Variable(0, trainable=False, dtype=tf.int32, name="aggregation_counter")
            for grad, variable in zip(grads, variables, strict=True):
                if grad is not None and key_of(variable) not in self._sums:
                    zeros = tf.zeros(tf.TensorShape(variable.shape), grad.dtype)
                    total = tf.Variable(zeros, trainable=False, name="aggregated_gradient")
                    self._sums[key_of(variable)] = total

    def _communicate(self, present: Sequence[int], variables: Sequence[Any]) -> list[Any]:
        totals = [self._sums[key_of(variables[index])] for index in present]
        sums: list[Any] = [None] * len(variables)
        for index, total in zip(present, totals, strict=True):
            found = total.read_value()
            sums[index] = divided(found, self.backward_passes_per_step) if self.average_aggregated_gradients else found
        results = self._reduce(sums, variables)
        sums, reduced = [sums[index] for index in present], [results[index] for index in present]
        with after([*sums, *reduced]):
            cleared = [total.assign(tf.zeros_like(total)) for total in totals]
            cleared.append(self.counter.assign(0))
        with after(cleared):
            return [tf.identity(grad) for grad in reduced]

    def _reduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        results: list[Any] = list(grads)
        shared = [index for index, variable in enumerate(variables) if key_of(variable) not in self._local]
        reduced = self.allreduce_grads([grads[i] for i in shared], [variables[i] for i in shared])
        for index, grad in zip(shared, reduced, strict=True):
            results[index] = grad
        if self.scale_local_gradients:
            for index in set(range(len(results))) - set(shared):
                results[index] = divided(results[index], members_of(self.process_set))
        return results

    def apply_gradients(self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply the gradients when a step is complete; otherwise only count the pass.

        Args:
            apply_grads_closure: function that applies the gradients.
            optimizer: its ``iterations`` count the passes, if it has them.
            *args: the pairs of gradient and variable, if given first.
            **kwargs: accepted and ignored.
        """
        if self.counter is None:
            return apply_grads_closure()
        grads = [grad for grad, _ in args[0]] if args else []
        with after(grads):
            is_complete = tf.equal(self.counter.read_value(), 0)
        return tf.cond(is_complete, lambda: _done(apply_grads_closure()), lambda: _count(optimizer))


class LocalGradientAggregationHelper(LocalGradientAggregationHelperEager):
    """``LocalGradientAggregationHelperEager`` with the arguments of Horovod's helper for graphs.

    ``rank``, ``optimizer_type`` and ``name`` are accepted and ignored.
    """

    OPTIMIZER_TYPE_KERAS = "optimizer_type_keras"
    OPTIMIZER_TYPE_LEGACY = "optimizer_type_legacy"

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[..., Sequence[Any]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        rank: int = 0,
        optimizer_type: str = OPTIMIZER_TYPE_LEGACY,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ) -> None:
        super().__init__(
            backward_passes_per_step, allreduce_func, sparse_as_dense, average_aggregated_gradients, process_set,
            scale_local_gradients,
        )  # fmt: skip


def after(tensors: Iterable[Any]) -> AbstractContextManager[Any]:
    """Return a context whose operations run after these, which may be None."""
    context: AbstractContextManager[Any] = tf.control_dependencies([each for each in tensors if each is not None])
    return context


def _done(operation: Any) -> Any:
    with after([operation]):
        return tf.constant(0)


def _count(optimizer: Any) -> Any:
    iterations = getattr(optimizer, "iterations", None)
    return _done(iterations.assign_add(1) if iterations is not None else None)
