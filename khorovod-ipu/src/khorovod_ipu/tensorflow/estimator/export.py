"""Export of a trained model as a SavedModel, and the result types of the user's functions for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from khorovod_ipu.tensorflow.estimator.model import call_model, new_graph
from khorovod_ipu.tensorflow.estimator.spec import ModeKeys

__all__ = [
    "ServingInputReceiver", "build_parsing_serving_input_receiver_fn", "build_raw_serving_input_receiver_fn",
    "export_saved_model",
]  # fmt: skip

v1 = tf.compat.v1
_SERVED = "serving_default"


class ServingInputReceiver(NamedTuple):
    """The result of a ``serving_input_receiver_fn``.

    Attributes:
        features: features for the model function.
        receiver_tensors: placeholders to feed; a single one, or several by name.
        receiver_tensors_alternatives: accepted if there are none.
    """

    features: Any
    receiver_tensors: Any
    receiver_tensors_alternatives: Any = None


def build_raw_serving_input_receiver_fn(
    features: Mapping[str, Any], default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """Return a function that takes unserialized features.

    Args:
        features: tensors by name; only their dtypes and shapes without the first dimension are used.
        default_batch_size: the first dimension; None leaves it open.
    """

    def receive() -> ServingInputReceiver:
        fed = {
            name: v1.placeholder(tensor.dtype, [default_batch_size, *tensor.shape[1:]], name=name)
            for name, tensor in features.items()
        }
        return ServingInputReceiver(fed, fed)

    return receive


def build_parsing_serving_input_receiver_fn(
    feature_spec: Mapping[str, Any], default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """Return a function that takes serialized ``tf.train.Example`` messages.

    Args:
        feature_spec: feature specification for ``tf.io.parse_example``.
        default_batch_size: number of messages per batch; None leaves it open.
    """

    def receive() -> ServingInputReceiver:
        serialized = v1.placeholder(tf.string, [default_batch_size], name="input_example_tensor")
        return ServingInputReceiver(tf.io.parse_example(serialized, dict(feature_spec)), {"examples": serialized})

    return receive


def _by_name(tensors: Any, name: str) -> dict[str, Any]:
    return dict(tensors) if isinstance(tensors, Mapping) else {name: tensors}


def export_saved_model(
    estimator: Any, folder: str, receive: Callable[[], ServingInputReceiver], checkpoint: str, as_text: bool
) -> bytes:
    """Write a SavedModel and return its folder; takes the arguments of ``IPUEstimator.export_saved_model``."""
    with new_graph():
        v1.train.create_global_step()
        receiver = receive()
        if receiver.receiver_tensors_alternatives:
            raise NotImplementedError("receiver_tensors_alternatives are not imitated: there is one signature")
        params = estimator.params_for(ModeKeys.PREDICT)
        mode = ModeKeys.PREDICT
        spec = call_model(estimator.model_fn, receiver.features, None, mode, params, estimator.config)
        signature = v1.saved_model.predict_signature_def(
            _by_name(receiver.receiver_tensors, "input"), _by_name(spec.predictions, "output")
        )
        number = int(time.time())
        while (target := Path(folder) / str(number)).exists():
            number += 1
        with v1.Session(config=estimator.config.session_config) as session:
            v1.train.Saver().restore(session, checkpoint)
            session.run([v1.local_variables_initializer(), v1.tables_initializer()])
            builder = v1.saved_model.Builder(str(target))
            builder.add_meta_graph_and_variables(
                session,
                [v1.saved_model.tag_constants.SERVING],
                {_SERVED: signature},
                main_op=v1.tables_initializer(),
                clear_devices=True,
            )
            builder.save(as_text)
    return str(target).encode()
