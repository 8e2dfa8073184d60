"""``KerasEstimator`` and ``KerasModel``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from horovod.errors import RequestError
from horovod.spark.common.estimator import HorovodEstimator
from horovod.spark.common.model import HorovodModel, Predict
from horovod.spark.common.params import has_params
from horovod.spark.common.training import Trained
from horovod.spark.keras.pickling import dumps, loads
from horovod.spark.keras.training import shaped, train, weights_from

__all__ = ["KerasEstimator", "KerasModel"]


class _Packed:
    """Mixin that pickles parameters that contain Keras objects."""

    _pack = staticmethod(dumps)
    _unpack = staticmethod(loads)


@has_params(
    (
        ("custom_objects", None, None, "classes and functions that the model is made of, by name"),
        (
            "checkpoint_callback",
            None,
            None,
            "such as BestModelCheckpoint; the model is then the best one, not the last",
        ),
        ("backend_env", None, None, "environment variables for the ranks"),
    )
)
class KerasEstimator(_Packed, HorovodEstimator):
    """Train a Keras 3 model on a DataFrame with several ranks; its arguments are those of ``HorovodEstimator``."""

    _train = staticmethod(train)
    _callback = keras.callbacks.Callback

    def _check(self) -> None:
        super()._check()
        value = self.getOrDefault
        model = value("model")
        if not isinstance(model, keras.Model) or not model.built:
            raise RequestError(
                f"KerasEstimator needs a model of Keras 3 that knows its inputs: begin it with keras.Input(shape), or "
                f"call model.build(). Received: {model!r}"
            )
        if value("optimizer") is None or value("loss") is None:
            raise RequestError("KerasEstimator needs optimizer and loss")
        if any(isinstance(each, keras.callbacks.BackupAndRestore) for each in value("callbacks") or ()):
            raise RequestError("callbacks must not have BackupAndRestore: give a run_id, with which fit() goes on")
        outputs, labels = getattr(model, "outputs", None), value("label_cols")
        if outputs and len(outputs) != len(labels):
            raise RequestError(f"the model has {len(outputs)} outputs for {len(labels)} label columns")

    def _environment(self) -> dict[str, str]:
        return {"KERAS_BACKEND": keras.backend.backend()} | (self.getOrDefault("backend_env") or {})

    def _model(self, objects: dict[str, Any], trained: Trained, run_id: str) -> Any:
        objects["model"].set_weights(weights_from(trained.state))
        return KerasModel(
            model=objects["model"], custom_objects=objects["custom_objects"], **self._common(trained, run_id)
        )


@has_params((("custom_objects", None, None, "classes and functions that the model is made of, by name"),))
class KerasModel(_Packed, HorovodModel):
    """Predict with a Keras 3 model; its arguments are those of ``HorovodModel``."""

    @staticmethod
    def _predictor(objects: dict[str, Any]) -> Predict:
        model = objects["model"]

        def predict(features: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
            inputs = [shaped(value, getattr(model, "inputs", None), i) for i, value in enumerate(features)]
            found = model.predict_on_batch(inputs[0] if len(inputs) == 1 else inputs)
            return [np.asarray(output) for output in keras.tree.flatten(found)]

        return predict
