"""The training step of TensorFlow that is measured, the same for all who take part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks.models_tensorflow import Task

__all__ = ["sgd_step"]

_RATE, _MOMENTUM = 0.01, 0.9


def _as_is(thing: Any) -> Any:
    return thing


def sgd_step(
    task: Task, reduce: Callable[[Any], Any] = _as_is, wrap: Callable[[Any], Any] = _as_is
) -> Callable[[], None]:
    """Return one step of SGD with momentum, as a function of TensorFlow's.

    Args:
        task: what to train.
        reduce: makes of this rank's gradients those of all ranks.
        wrap: makes of a tape the one to ask for gradients.
    """
    variables = [variable.value for variable in task.model.trainable_variables]
    momenta = [tf.Variable(tf.zeros_like(variable)) for variable in variables]

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = task.loss()
        grads = reduce(wrap(tape).gradient(loss, variables))
        for variable, momentum, grad in zip(variables, momenta, grads, strict=True):
            momentum.assign(_MOMENTUM * momentum + grad)
            variable.assign_sub(_RATE * momentum)

    return step
