"""The Estimator: a model function, a folder and a configuration."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from khorovod_ipu.tensorflow import sessions
from khorovod_ipu.tensorflow.estimator import evaluation, export, training
from khorovod_ipu.tensorflow.estimator.inputs import batch_size
from khorovod_ipu.tensorflow.estimator.run_config import RunConfig
from khorovod_ipu.tensorflow.estimator.spec import ModeKeys

__all__ = ["IPUEstimator"]

v1 = tf.compat.v1


class IPUEstimator:
    """Trains, evaluates and predicts with a model function, in graphs of TensorFlow 1.

    Args:
        model_fn: called with features and, as far as it declares them, labels, mode, params and config; returns an
            IPUEstimatorSpec or an EstimatorSpec.
        model_dir: folder of checkpoints and summaries; may be set in ``config`` instead.
        config: configuration of the runs.
        params: hyperparameters for the model function and input functions.
        warm_start_from: a checkpoint, or a folder of checkpoints, with the initial values of the variables.
        train_batch_size: batch size of all workers together; ``params["batch_size"]`` is one worker's part.
        eval_batch_size: batch size of evaluate().
        predict_batch_size: batch size of predict().

    Attributes:
        model_dir: folder of checkpoints and summaries.
        config: configuration of the runs.

    Raises:
        TypeError: ``config`` is not a RunConfig.
        ValueError: arguments disagree, or a batch cannot be divided among the workers.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: Any = None,
        train_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        predict_batch_size: int | None = None,
    ) -> None:
        sessions.prepare()
        if config is not None and not isinstance(config, RunConfig):
            raise TypeError(f"config must be an ipu_run_config.RunConfig. Received: {type(config).__name__}")
        config = config or RunConfig()
        if model_dir and config.model_dir and model_dir != config.model_dir:
            raise ValueError(f"model_dir={model_dir!r}, but the RunConfig says {config.model_dir!r}")
        self._model_fn = model_fn
        self.model_dir = model_dir or config.model_dir or tempfile.mkdtemp()
        self.config = config.replace(model_dir=self.model_dir)
        self._params = dict(params or {})
        if "batch_size" in self._params and (train_batch_size or eval_batch_size or predict_batch_size):
            raise ValueError("params has a batch_size, and the Estimator was given one, too")
        self._batch_sizes = {
            ModeKeys.TRAIN: batch_size("train_batch_size", train_batch_size, config.num_worker_replicas),
            ModeKeys.EVAL: batch_size("eval_batch_size", eval_batch_size, 1),
            ModeKeys.PREDICT: batch_size("predict_batch_size", predict_batch_size, 1),
        }
        self._warm_start_from = warm_start_from

    @property
    def model_fn(self) -> Callable[..., Any]:
        """The model function."""
        if self._warm_start_from is None:
            return self._model_fn
        return _warmly_started(self._model_fn, self._warm_start_from, self.latest_checkpoint())

    @property
    def params(self) -> dict[str, Any]:
        """A copy of the hyperparameters."""
        return dict(self._params)

    def params_for(self, mode: str) -> dict[str, Any]:
        """Return the hyperparameters with this worker's batch size.

        Args:
            mode: one of ``ModeKeys``.
        """
        size = self._batch_sizes[mode]
        return self.params if size is None else {**self._params, "batch_size": size}

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[Any] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[Any] | None = None,
    ) -> IPUEstimator:
        """Train, starting from the newest checkpoint of ``model_dir``.

        With ``train_distribute`` all workers must call it; worker 0's folder is used.

        Args:
            input_fn: returns a Dataset of (features, labels); gets mode, params, config and input_context if it
                declares them.
            hooks: session hooks.
            steps: number of steps; None trains until the input ends.
            max_steps: number of steps of all calls together; nothing happens if they are already done.
            saving_listeners: called at every checkpoint, on worker 0.

        Returns:
            This Estimator.

        Raises:
            ValueError: ``steps`` and ``max_steps`` are both given, or are no multiple of the iterations of a loop.
        """
        if steps is not None and max_steps is not None:
            raise ValueError("give steps or max_steps, not both")
        for name, value in (("steps", steps), ("max_steps", max_steps)):
            if value is not None and (value <= 0 or value % self.config.device.iterations_per_loop):
                raise ValueError(
                    f"{name} must be a positive multiple of iterations_per_loop="
                    f"{self.config.device.iterations_per_loop}. Received: {value}"
                )
        stop = training.StopAtStep(steps, max_steps)
        training.train(self, input_fn, list(hooks or ()), stop, list(saving_listeners or ()))
        return self

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Evaluate a checkpoint on this worker only.

        Args:
            input_fn: returns a Dataset of (features, labels).
            steps: number of batches; None evaluates until the input ends.
            hooks: session hooks.
            checkpoint_path: the checkpoint; None takes the newest.
            name: name of this evaluation; its summaries are in ``eval_<name>``.

        Returns:
            The metrics, ``loss`` and ``global_step``.

        Raises:
            ValueError: there is no checkpoint, or no batch.
        """
        checkpoint = checkpoint_path or self._newest("evaluate")
        return evaluation.evaluate(self, input_fn, steps, list(hooks or ()), checkpoint, name)

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Yield predictions on this worker only.

        Args:
            input_fn: returns a Dataset of features, or of (features, labels); labels are ignored.
            predict_keys: keys of the predictions to yield; None yields all.
            hooks: session hooks.
            checkpoint_path: the checkpoint; None takes the newest.
            yield_single_examples: whether to yield one example at a time, instead of one batch.

        Raises:
            ValueError: there is no checkpoint.
        """
        checkpoint = checkpoint_path or self._newest("predict")
        return evaluation.predict(self, input_fn, predict_keys, list(hooks or ()), checkpoint, yield_single_examples)

    def export_saved_model(
        self,
        export_dir_base: str,
        serving_input_receiver_fn: Callable[[], export.ServingInputReceiver],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        checkpoint_path: str | None = None,
        experimental_mode: str = ModeKeys.PREDICT,
    ) -> bytes:
        """Write the prediction graph as a SavedModel with the signature ``serving_default``; call it on one worker.

        Args:
            export_dir_base: parent folder; the new folder's name is the time.
            serving_input_receiver_fn: returns a ServingInputReceiver.
            assets_extra: accepted if there are none.
            as_text: whether to write text instead of binary.
            checkpoint_path: the checkpoint; None takes the newest.
            experimental_mode: accepted if it is to predict.

        Returns:
            The folder, as bytes.

        Raises:
            ValueError: there is no checkpoint.
            NotImplementedError: extra files, or a mode other than predict.
        """
        if assets_extra or experimental_mode != ModeKeys.PREDICT:
            raise NotImplementedError("export_saved_model writes predictions, and no extra files beside them")
        checkpoint = checkpoint_path or self._newest("export")
        return export.export_saved_model(self, export_dir_base, serving_input_receiver_fn, checkpoint, as_text)

    def _newest(self, what: str) -> str:
        newest = self.latest_checkpoint()
        if newest is None:
            raise ValueError(f"there is nothing to {what} yet: no checkpoint in {self.model_dir}")
        return newest

    def latest_checkpoint(self) -> str | None:
        """Return the newest checkpoint of ``model_dir``, or None."""
        found: str | None = tf.train.latest_checkpoint(self.model_dir)
        return found

    def get_variable_names(self) -> list[str]:
        """Return the names of the variables in the newest checkpoint."""
        return [name for name, _ in tf.train.list_variables(self._newest("look into"))]

    def get_variable_value(self, name: str) -> Any:
        """Return a variable's value in the newest checkpoint.

        Args:
            name: name of the variable.
        """
        return tf.train.load_variable(self._newest("look into"), name)


def _warmly_started(model_fn: Callable[..., Any], start: Any, resumed: str | None) -> Callable[..., Any]:
    """Return a model function that starts from another checkpoint's values, unless it resumes from its own."""

    @functools.wraps(model_fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        spec = model_fn(*args, **kwargs)
        if resumed is None:
            v1.train.warm_start(start)
        return spec

    return wrapped
