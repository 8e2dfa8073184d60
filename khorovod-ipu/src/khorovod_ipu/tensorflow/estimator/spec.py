"""Results of model functions, and arguments of ``train_and_evaluate``."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

__all__ = ["EstimatorSpec", "EvalSpec", "IPUEstimatorSpec", "ModeKeys", "TrainSpec"]


class ModeKeys:
    """Modes in which a model function is called."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


def _check_call(what: str, call: Any) -> None:
    if not isinstance(call, tuple):
        raise TypeError(f"{what} must be a tuple (function, tensors). Received: {type(call).__name__}")
    if len(call) != 2:
        raise ValueError(f"{what} must be a tuple of two, (function, tensors). Received: {len(call)} items")
    function, tensors = call
    if not callable(function):
        raise TypeError(f"the first item of {what} must be a function. Received: {type(function).__name__}")
    if not isinstance(tensors, (list, tuple, Mapping)):
        raise TypeError(f"the second item of {what} must be a list of tensors. Received: {type(tensors).__name__}")
    values = tensors.values() if isinstance(tensors, Mapping) else tensors
    for index, tensor in enumerate(values):
        if not tf.is_tensor(tensor):
            raise TypeError(
                f"{what} takes tensors, but item {index} is {tensor!r}. A gradient is None if the loss does not "
                "depend on the variable"
            )


_Spec = namedtuple(
    "_Spec",
    "mode predictions loss train_op eval_metric_ops eval_metrics host_call training_hooks evaluation_hooks "
    "prediction_hooks training_chief_hooks scaffold",
    defaults=((), None),  # set only in an EstimatorSpec
)


class IPUEstimatorSpec(_Spec):
    """The result of a model function for an IPUEstimator.

    Args:
        mode: one of ``ModeKeys``.
        predictions: tensor or dictionary of tensors, for predict().
        loss: loss of this worker's batch; needed to train and to evaluate.
        train_op: operation of one step; with ``host_call`` the device's part, usually ``tf.identity(loss)``.
        eval_metric_ops: name to (value, update operation).
        eval_metrics: (function, tensors); the function returns ``eval_metric_ops``.
        host_call: (function, tensors); the function gets the tensors on the host, each as soon as it is available, and
            returns the operation that makes the step.
        training_hooks: session hooks for train().
        evaluation_hooks: session hooks for evaluate().
        prediction_hooks: session hooks for predict().
    """

    def __new__(
        cls,
        mode: str,
        predictions: Any = None,
        loss: Any = None,
        train_op: Any = None,
        eval_metric_ops: Mapping[str, Any] | None = None,
        eval_metrics: Any = None,
        host_call: Any = None,
        training_hooks: Sequence[Any] | None = None,
        evaluation_hooks: Sequence[Any] | None = None,
        prediction_hooks: Sequence[Any] | None = None,
    ) -> IPUEstimatorSpec:
        if mode == ModeKeys.TRAIN:
            _check_training(loss, train_op)
        elif mode == ModeKeys.EVAL:
            if loss is None:
                raise ValueError("to evaluate, a model function must return a loss")
        elif mode == ModeKeys.PREDICT:
            if predictions is None:
                raise ValueError("to predict, a model function must return predictions")
        else:
            raise ValueError(f"mode must be train, eval or infer. Received: {mode!r}")
        if host_call is not None:
            if mode != ModeKeys.TRAIN:
                raise ValueError(f"host_call is for training only; the mode is {mode!r}")
            _check_call("host_call", host_call)
        if eval_metrics is not None:
            _check_call("eval_metrics", eval_metrics)
            if eval_metric_ops:
                raise ValueError("give eval_metrics or eval_metric_ops, not both")
        return super().__new__(
            cls, mode, predictions, loss, train_op, dict(eval_metric_ops or {}), eval_metrics, host_call,
            tuple(training_hooks or ()), tuple(evaluation_hooks or ()), tuple(prediction_hooks or ()),
        )  # fmt: skip


def _check_training(loss: Any, train_op: Any) -> None:
    if loss is None:
        raise ValueError("to train, a model function must return a loss")
    if train_op is None:
        raise ValueError("to train, a model function must return a train_op")
    if not (isinstance(train_op, tf.Operation) or tf.is_tensor(train_op)):
        raise TypeError(f"train_op must be a tensor or an operation. Received: {type(train_op).__name__}")


class EstimatorSpec(IPUEstimatorSpec):
    """``tf.estimator.EstimatorSpec`` with the parts that an IPUEstimator uses.

    Args:
        mode: one of ``ModeKeys``.
        predictions: for predict().
        loss: loss of this worker's batch.
        train_op: makes one step.
        eval_metric_ops: name to (value, update operation).
        export_outputs: accepted.
        training_chief_hooks: session hooks for train(), of worker 0 only.
        training_hooks: session hooks for train().
        scaffold: for train(), a ``tf.compat.v1.train.Scaffold`` without a saver. Its ``init_fn`` runs on every worker
            before worker 0 restores a checkpoint and gives its values to the others.
        evaluation_hooks: session hooks for evaluate().
        prediction_hooks: session hooks for predict().
    """

    def __new__(
        cls,
        mode: str,
        predictions: Any = None,
        loss: Any = None,
        train_op: Any = None,
        eval_metric_ops: Mapping[str, Any] | None = None,
        export_outputs: Any = None,
        training_chief_hooks: Sequence[Any] | None = None,
        training_hooks: Sequence[Any] | None = None,
        scaffold: Any = None,
        evaluation_hooks: Sequence[Any] | None = None,
        prediction_hooks: Sequence[Any] | None = None,
    ) -> EstimatorSpec:
        if scaffold is not None and not isinstance(scaffold, tf.compat.v1.train.Scaffold):
            raise TypeError(f"scaffold must be a tf.train.Scaffold. Received: {type(scaffold).__name__}")
        if scaffold is not None and scaffold.saver is not None:
            raise ValueError(
                "an IPUEstimator takes a scaffold without a saver: its own knows which variables are a worker's part. "
                "RunConfig's keep_checkpoint_max says how many checkpoints are kept"
            )
        made: Any = super().__new__(
            cls, mode, predictions, loss, train_op, eval_metric_ops, None, None, training_hooks, evaluation_hooks,
            prediction_hooks,
        )  # fmt: skip
        return made._replace(  # type: ignore[no-any-return]
            training_chief_hooks=tuple(training_chief_hooks or ()), scaffold=scaffold
        )


class TrainSpec(NamedTuple):
    """Arguments of training.

    Attributes:
        input_fn: as for ``train``.
        max_steps: number of steps of all runs together; None trains until the input ends.
        hooks: session hooks.
        saving_listeners: called at every checkpoint.
    """

    input_fn: Callable[..., Any]
    max_steps: int | None = None
    hooks: Sequence[Any] | None = None
    saving_listeners: Sequence[Any] | None = None


class EvalSpec(NamedTuple):
    """Arguments of evaluation.

    Attributes:
        input_fn: as for ``evaluate``.
        steps: number of batches of one evaluation; None evaluates until the input ends.
        name: name of this evaluation, if there are several.
        hooks: session hooks.
        exporters: refused by ``train_and_evaluate``.
        start_delay_secs: accepted; the first evaluation follows the first checkpoint after training has begun.
        throttle_secs: minimum seconds between two evaluations.
    """

    input_fn: Callable[..., Any]
    steps: int | None = 100
    name: str | None = None
    hooks: Sequence[Any] | None = None
    exporters: Any = None
    start_delay_secs: int = 120
    throttle_secs: int = 600
