"""Distributed optimizers of tf_keras: the new ones and those of ``optimizers.legacy``.

``fit()`` calls the optimizer to compute, aggregate and apply gradients; a custom loop may only apply them.
Gradients are combined in the first of these calls, and before loss scaling checks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from horovod._keras.members import Distributed, make_distributed
from horovod._keras.on_tensorflow import backend
from horovod._keras.reduction import GradientReduction
from horovod._keras.settings import Settings
from horovod.bindings.misuse import wrong_argument
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelperEager

__all__ = ["LEGACY", "build", "distribute", "innermost"]

#: Whether ``tf.keras`` is tf_keras, with TF_USE_LEGACY_KERAS=1; else it is Keras 3.
LEGACY: bool = tf.keras.Model.__module__.startswith("tf_keras.")

Pairs = list[tuple[Any, Any]]


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside a loss scaling optimizer, or ``optimizer`` itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Create an optimizer's variables if they do not exist."""
    optimizer = innermost(optimizer)
    with tf.init_scope():
        if hasattr(optimizer, "build"):
            optimizer.build(variables)
        else:
            optimizer._create_all_weights(variables)


class LegacyMembers(Distributed):
    """See the module."""

    _settings: Settings
    _agg_helper: LocalGradientAggregationHelperEager
    # Whether compute_gradients() has combined the gradients, so that apply_gradients() must not repeat it.
    _is_combined = False

    def _reduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return self._reduction.combine(grads, variables, range(len(grads)))

    def _combine(self, grads_and_vars: Any) -> Pairs:
        grads, variables = zip(*grads_and_vars, strict=True)
        self._reduction.prepare(variables)
        return list(zip(self._agg_helper.compute_gradients(grads, variables), variables, strict=True))

    def _computed(self, pairs: Pairs) -> Pairs:
        if not pairs:
            return pairs
        self.__dict__["_is_combined"] = True
        return self._combine(pairs)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Pairs:
        """Return the combined gradients of all ranks; takes the arguments of the optimizer's own class."""
        return self._computed(super().compute_gradients(*args, **kwargs))  # type: ignore[misc]

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Pairs:
        """Return the combined gradients of all ranks, for the optimizers of ``optimizers.legacy``."""
        own = getattr(super(), "_compute_gradients", None)
        if own is None:
            return self.compute_gradients(loss, var_list, tape)
        return self._computed(own(loss, var_list, grad_loss, tape))

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """Return the combined gradients of all ranks, in a graph of TensorFlow 1."""
        pairs = list(zip(super().get_gradients(loss, params), params, strict=True))  # type: ignore[misc]
        return [gradient for gradient, _ in self._computed(pairs)]

    def aggregate_gradients(self, grads_and_vars: Any) -> Pairs:
        """Combine gradients over all ranks, unless ``compute_gradients`` has combined them."""
        pairs = list(grads_and_vars)
        if self.__dict__.pop("_is_combined", False) or not pairs:
            return pairs
        return self._combine(pairs)

    _aggregate_gradients = aggregate_gradients

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply the combined gradients of all ranks, in the last pass of a step."""
        apply = super().apply_gradients  # type: ignore[misc]
        if self._settings.passes == 1:
            return apply(grads_and_vars, *args, **kwargs)
        pairs = list(grads_and_vars)
        asked = kwargs.pop("experimental_aggregate_gradients", True) and not kwargs.pop(
            "skip_gradients_aggregation", False
        )
        pairs = self.aggregate_gradients(pairs) if asked else pairs
        variables = [variable for _, variable in pairs]
        build(self, variables)
        is_new = hasattr(super(), "aggregate_gradients")
        skip = {"skip_gradients_aggregation": True} if is_new else {"experimental_aggregate_gradients": False}
        return self._agg_helper.apply_gradients(lambda: apply(pairs, *args, **kwargs, **skip), self, pairs)

    def finalize_variable_values(self, var_list: Any) -> Any:
        """Finish ``fit()``, and check that all ranks have taken the same number of steps."""
        self._reduction.agree_on_end("fit()")
        return super().finalize_variable_values(var_list)  # type: ignore[misc]


def distribute(optimizer: Any, settings: Settings) -> Any:
    """Make an optimizer of tf_keras distributed, in place, and return it.

    Raises:
        RequestError: ``optimizer`` is not an optimizer of tf_keras.
    """
    if isinstance(optimizer, str | dict):
        optimizer = tf.keras.optimizers.get(optimizer)
    is_legacy = any(cls.__module__.partition(".")[0] == "tf_keras" for cls in type(optimizer).__mro__)
    if not is_legacy or not hasattr(optimizer, "apply_gradients"):
        raise wrong_argument(
            "with TF_USE_LEGACY_KERAS=1 optimizer must be one of tf_keras, such as tf.keras.optimizers.SGD(0.1). "
            f"Received: {type(optimizer).__module__}.{type(optimizer).__name__}"
        )
    inner = innermost(optimizer)
    # The helper accumulates and averages the passes.
    reduction = GradientReduction(replace(settings, passes=1), backend, lambda variable: variable.ref())
    make_distributed(inner, LegacyMembers, reduction)
    inner.__dict__["_settings"] = settings
    inner.__dict__["_agg_helper"] = LocalGradientAggregationHelperEager(
        settings.passes, inner._reduce, settings.sparse_as_dense, settings.passes_are_averaged
    )
    return optimizer
