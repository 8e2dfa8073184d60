"""Optimizers that combine the gradients of all ranks before they apply them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod.bindings.docstrings import explained_like
from horovod.bindings.gradients.parameters import groups_argument, predivided
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.bindings.reductions import resolve_op
from horovod.core.requests import ReduceOp
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper, after
from horovod.tensorflow.reducing import GradientSettings, make_reducer, reduce_gradients
from horovod.tensorflow.tape import DistributedGradientTape

__all__ = ["DistributedOptimizer"]


class _Wrapper(tf.compat.v1.train.Optimizer):
    """An optimizer of TensorFlow 1 that combines the gradients of all ranks."""

    def __init__(self, optimizer: Any, name: str, use_locking: bool, helper: LocalGradientAggregationHelper) -> None:
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer
        self._agg_helper = helper
        # The slots are those of the wrapped optimizer.
        self.get_slot, self.get_slot_names = optimizer.get_slot, optimizer.get_slot_names
        self.variables = optimizer.variables

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of a variable local to this rank.

        Args:
            var: the variable.
        """
        self._agg_helper.register_local_var(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Compute gradients with the wrapped optimizer, and combine them over all ranks."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        if not pairs:
            return []
        grads, variables = zip(*pairs, strict=True)
        return list(zip(self._agg_helper.compute_gradients(grads, variables), variables, strict=True))

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply gradients with the wrapped optimizer, in the last pass of a step."""
        pairs = list(grads_and_vars)
        return self._agg_helper.apply_gradients(
            lambda: self._optimizer.apply_gradients(pairs, *args, **kwargs), self._optimizer, pairs
        )


class _AdasumWrapper(_Wrapper):
    """Combines the ranks' local steps by Adasum."""

    def __init__(self, optimizer: Any, name: str, use_locking: bool, settings: GradientSettings, passes: int) -> None:
        # Gradients are accumulated locally and not sent; Adasum combines the steps.
        helper = LocalGradientAggregationHelper(
            passes, lambda grads, variables: grads, settings.sparse_as_dense, False, process_set=settings.process_set
        )
        super().__init__(optimizer, name, use_locking, helper)
        self._settings = settings

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Step locally, and move the variables by the combined step."""
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]

        def take_step() -> Any:
            before = [None if grad is None else tf.identity(variable) for grad, variable in pairs]
            with after(before):
                step = self._optimizer.apply_gradients(pairs, *args, **kwargs)
            with after([step]):
                moved = [
                    None if start is None else variable.read_value() - start
                    for variable, start in zip(variables, before, strict=True)
                ]
            reduced = reduce_gradients(self._settings, moved, variables)
            assigned = [
                variable.assign(start + move)
                for variable, start, move in zip(variables, before, reduced, strict=True)
                if start is not None
            ]
            return tf.group(*assigned)

        return self._agg_helper.apply_gradients(take_step, self._optimizer, pairs)


@explained_like(
    DistributedGradientTape,
    optimizer="of ``tf.compat.v1.train``, or of Keras; the latter goes to ``horovod.tensorflow.keras``.",
    name="of the optimizer.",
    use_locking="as for the optimizers of TensorFlow 1.",
    backward_passes_per_step="how many passes add up to one step.",
    average_aggregated_gradients="divide by the number of passes.",
    scale_local_gradients="divide the gradients of local variables by the number of ranks.",
)
def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer that combines the gradients of all ranks before it applies them.

    Returns:
        The optimizer, with ``register_local_var(var)``.

    Raises:
        ValueError: arguments are incompatible, or the optimizer is of an unknown kind.
    """
    op = resolve_op(op, None)
    if op is ReduceOp.ADASUM and average_aggregated_gradients:
        raise ValueError("Adasum does not support average_aggregated_gradients == True")
    groups = groups_argument(num_groups, groups)
    settings = GradientSettings(
        op, *predivided(op, gradient_predivide_factor), process_set, compression, sparse_as_dense,
        "DistributedOptimizer", groups,
    )  # fmt: skip
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if op is ReduceOp.ADASUM:
            raise ValueError("op == Adasum is not supported yet with Keras")
        make: Callable[..., Any] = importlib.import_module("horovod.tensorflow.keras").DistributedOptimizer
        return make(
            optimizer, name=name, compression=compression, sparse_as_dense=sparse_as_dense, op=op,
            gradient_predivide_factor=gradient_predivide_factor, backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients, groups=groups, process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )  # fmt: skip
    if backward_passes_per_step > 1 and tf.executing_eagerly():
        raise ValueError(
            "backward_passes_per_step > 1 is not supported for an optimizer of tf.compat.v1.train with eager "
            "execution; use one of Keras, or a graph"
        )
    label = name or f"Distributed{type(optimizer).__name__}"
    if op is ReduceOp.ADASUM:
        return _AdasumWrapper(optimizer, label, use_locking, settings, backward_passes_per_step)
    helper = LocalGradientAggregationHelper(
        backward_passes_per_step, make_reducer(settings), sparse_as_dense, average_aggregated_gradients,
        process_set=process_set, scale_local_gradients=scale_local_gradients,
    )  # fmt: skip
    return _Wrapper(optimizer, label, use_locking, helper)
