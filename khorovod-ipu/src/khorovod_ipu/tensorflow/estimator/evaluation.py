"""``evaluate()`` and ``predict()``: run on this worker only, from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from khorovod_ipu.tensorflow.estimator.inputs import next_batches
from khorovod_ipu.tensorflow.estimator.model import call_model, new_graph
from khorovod_ipu.tensorflow.estimator.spec import IPUEstimatorSpec, ModeKeys

__all__ = ["evaluate", "predict"]

v1 = tf.compat.v1


def _restoring_session(checkpoint: str | None, config: Any, hooks: Sequence[Any]) -> Any:
    return v1.train.SingularMonitoredSession(
        hooks, config=config.session_config, checkpoint_filename_with_path=checkpoint
    )


def _called(estimator: Any, input_fn: Callable[..., Any], mode: str) -> IPUEstimatorSpec:
    config, params = estimator.config, estimator.params_for(mode)
    if config.tf_random_seed is not None:
        v1.set_random_seed(config.tf_random_seed)
    v1.train.create_global_step()
    [(features, labels)] = next_batches(input_fn, mode, params, config, None, config.device.prefetch_depth)
    return call_model(estimator.model_fn, features, labels, mode, params, config)


def _metric_ops(spec: IPUEstimatorSpec) -> dict[str, tuple[Any, Any]]:
    metrics = dict(spec.eval_metric_ops)
    if spec.eval_metrics is not None:
        function, tensors = spec.eval_metrics
        with tf.device("/device:CPU:0"):
            metrics = dict(function(**tensors) if isinstance(tensors, dict) else function(*tensors))
    found = {}
    for name, metric in metrics.items():
        if hasattr(metric, "result") and hasattr(metric, "updates"):
            metric = (metric.result(), metric.updates[0])
        if not isinstance(metric, tuple) or len(metric) != 2:
            raise TypeError(f"metric {name!r} must be (value, update operation). Received: {metric!r}")
        found[name] = metric
    if "loss" not in found:
        found["loss"] = v1.metrics.mean(spec.loss)
    return found


def evaluate(
    estimator: Any,
    input_fn: Callable[..., Any],
    steps: int | None,
    hooks: Sequence[Any],
    checkpoint: str | None,
    name: str | None,
) -> dict[str, Any]:
    """Return the metrics, loss and step of a checkpoint; takes the arguments of ``IPUEstimator.evaluate``."""
    with new_graph():
        spec = _called(estimator, input_fn, ModeKeys.EVAL)
        metrics = _metric_ops(spec)
        global_step = v1.train.get_global_step()
        values = {key: value for key, (value, _) in metrics.items()}
        updates = tf.group(*[update for _, update in metrics.values()])
        found: dict[str, Any] = {}
        done = 0
        with _restoring_session(checkpoint, estimator.config, [*hooks, *spec.evaluation_hooks]) as session:
            while not session.should_stop() and (steps is None or done < steps):
                try:
                    session.run(updates)
                except tf.errors.OutOfRangeError:
                    break
                done += 1
            found = session.raw_session().run({**values, "global_step": global_step})
        if not done:
            raise ValueError("evaluate() got no batch from input_fn")
        _write_summary(Path(estimator.model_dir) / (f"eval_{name}" if name else "eval"), found)
    return found


def _write_summary(folder: Path, found: dict[str, Any]) -> None:
    writer = v1.summary.FileWriterCache.get(str(folder))
    summary = v1.Summary()
    for key, value in found.items():
        if key != "global_step" and np.ndim(value) == 0:
            summary.value.add(tag=key, simple_value=float(value))
    writer.add_summary(summary, int(found["global_step"]))
    writer.flush()


def predict(
    estimator: Any,
    input_fn: Callable[..., Any],
    keys: Sequence[str] | None,
    hooks: Sequence[Any],
    checkpoint: str | None,
    single: bool,
) -> Iterator[Any]:
    """Yield predictions; takes the arguments of ``IPUEstimator.predict``."""
    with new_graph():
        spec = _called(estimator, input_fn, ModeKeys.PREDICT)
        predictions = spec.predictions
        if keys is not None:
            if not isinstance(predictions, dict):
                raise ValueError("predict_keys needs predictions that are a dictionary")
            predictions = {key: value for key, value in predictions.items() if key in keys}
            if not predictions:
                raise ValueError(f"there is none of {list(keys)} among the predictions {list(spec.predictions)}")
        with _restoring_session(checkpoint, estimator.config, [*hooks, *spec.prediction_hooks]) as session:
            while not session.should_stop():
                try:
                    batch = session.run(predictions)
                except tf.errors.OutOfRangeError:
                    return
                if not single:
                    yield batch
                elif isinstance(batch, dict):
                    for index in range(len(next(iter(batch.values())))):
                        yield {key: value[index] for key, value in batch.items()}
                else:
                    yield from batch
