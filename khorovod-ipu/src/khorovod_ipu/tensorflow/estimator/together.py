"""Training with evaluations in between."""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

from khorovod_ipu.tensorflow.estimator.estimator import IPUEstimator
from khorovod_ipu.tensorflow.estimator.spec import EvalSpec, TrainSpec

__all__ = ["train_and_evaluate"]

v1 = tf.compat.v1


class _EvaluateAtCheckpoints(tf.compat.v1.train.CheckpointSaverListener):
    """Evaluates on worker 0 after each checkpoint; the other workers wait for worker 0's next gradient."""

    def __init__(self, estimator: IPUEstimator, spec: EvalSpec) -> None:
        self._estimator = estimator
        self._spec = spec
        self._first: int | None = None
        self._last: float | None = None
        self._step = -1
        self.results: dict[str, Any] | None = None

    def after_save(self, session: Any, global_step_value: int) -> None:
        """Evaluate if the last evaluation is at least ``throttle_secs`` ago."""
        if self._first is None:
            self._first = global_step_value  # this checkpoint precedes the first step: nothing new
            return
        if self._last is None or time.monotonic() - self._last >= self._spec.throttle_secs:
            self._evaluate(global_step_value)

    def finish(self) -> None:
        """Evaluate the last checkpoint, unless it was already evaluated."""
        newest = self._estimator.latest_checkpoint()
        step = int(newest.rpartition("-")[2]) if newest else -1
        if self._step != step:
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        self._last, self._step = time.monotonic(), step
        self.results = self._estimator.evaluate(
            self._spec.input_fn, self._spec.steps, self._spec.hooks, name=self._spec.name
        )


def train_and_evaluate(estimator: IPUEstimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> tuple[Any, list[Any]]:
    """Train, and evaluate at checkpoints and at the end.

    With ``train_distribute`` all workers must call it: all train, worker 0 evaluates.

    Args:
        estimator: the estimator to run.
        train_spec: settings of the training.
        eval_spec: settings of the evaluations.

    Returns:
        The metrics of the last evaluation (None on workers other than 0), and an empty list: there are no exporters.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the EvalSpec has exporters.
    """
    if not isinstance(estimator, IPUEstimator):
        raise TypeError(f"estimator must be an IPUEstimator. Received: {type(estimator).__name__}")
    if not isinstance(train_spec, TrainSpec) or not isinstance(eval_spec, EvalSpec):
        raise TypeError("train_and_evaluate takes a TrainSpec and an EvalSpec")
    if eval_spec.exporters:
        raise ValueError("exporters are not imitated: call estimator.export_saved_model() after train_and_evaluate()")
    watcher = _EvaluateAtCheckpoints(estimator, eval_spec)
    estimator.train(
        train_spec.input_fn,
        hooks=train_spec.hooks,
        max_steps=train_spec.max_steps,
        saving_listeners=[*(train_spec.saving_listeners or ()), watcher],
    )
    if not estimator.config.is_chief:
        return None, []
    watcher.finish()
    return watcher.results, []
