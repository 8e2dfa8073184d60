"""Calls of a model function, and its host part."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from khorovod_ipu.tensorflow.estimator.inputs import called
from khorovod_ipu.tensorflow.estimator.spec import IPUEstimatorSpec

__all__ = ["call_model", "new_graph", "step_on_host"]


@contextlib.contextmanager
def new_graph() -> Iterator[None]:
    """Return a context with a new graph that uses resource variables, even after ``tf.disable_v2_behavior()``."""
    with tf.Graph().as_default():
        tf.compat.v1.get_variable_scope().set_use_resource(True)
        yield


def call_model(
    model_fn: Callable[..., Any], features: Any, labels: Any, mode: str, params: dict[str, Any], config: Any
) -> IPUEstimatorSpec:
    """Call a model function.

    Args:
        model_fn: function of the user; gets labels, mode, params and config if it declares them.
        features: first argument.
        labels: None if the input has none.
        mode: one of ``ModeKeys``.
        params: hyperparameters.
        config: the RunConfig.

    Raises:
        TypeError: ``model_fn`` returned neither an IPUEstimatorSpec nor an EstimatorSpec.
        ValueError: ``model_fn`` does not take labels, but the input has labels.
    """
    parameters = inspect.signature(model_fn).parameters
    if labels is not None and "labels" not in parameters:
        raise ValueError("model_fn does not take labels, but input_fn returns some")
    with _names_of_a_new_graph():
        spec = called(model_fn, features, labels=labels, mode=mode, params=params, config=config)
    if not isinstance(spec, IPUEstimatorSpec):
        raise TypeError(
            f"model_fn must return an IPUEstimatorSpec or an EstimatorSpec. Received: {type(spec).__name__}"
        )
    return spec


@contextlib.contextmanager
def _names_of_a_new_graph() -> Iterator[None]:
    """Make Keras 3 count its names per graph, as Keras 2 does: evaluation must find the trained variables by name."""
    state: Any = sys.modules.get("keras.src.backend.common.global_state")
    if state is None:
        yield
        return
    kept = state.get_global_attribute("object_name_uids")
    state.set_global_attribute("object_name_uids", defaultdict(int))
    try:
        yield
    finally:
        state.set_global_attribute("object_name_uids", kept)


def step_on_host(spec: IPUEstimatorSpec, host: str) -> Any:
    """Add the operations of ``host_call``; return the operation that makes the step.

    Each tensor is passed by a separate operation, so the host's part of the graph starts with the first available
    tensor, while the device computes the others.

    Args:
        spec: result of the model function.
        host: TensorFlow's name of this worker's processor.

    Raises:
        TypeError: the function returned neither a tensor nor an operation.
    """
    function, tensors = spec.host_call
    with tf.device(host):
        if isinstance(tensors, Mapping):
            made = function(**{key: _arrived(tensor) for key, tensor in tensors.items()})
        else:
            made = function(*[_arrived(tensor) for tensor in tensors])
    if not (isinstance(made, tf.Operation) or tf.is_tensor(made)):
        raise TypeError(
            "the function of host_call must return the operation that makes the step, such as what "
            f"optimizer.apply_gradients returns. Received: {type(made).__name__}"
        )
    return made


def _arrived(tensor: Any) -> Any:
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(tensor.values), tf.identity(tensor.indices), tensor.dense_shape)
    return tf.identity(tensor, name=f"{tensor.op.name.rpartition('/')[2]}_on_host")
