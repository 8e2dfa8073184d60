"""Conversion of input functions to tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from khorovod_ipu.tensorflow.estimator.spec import ModeKeys

__all__ = ["batch_size", "called", "next_batches"]

v1 = tf.compat.v1


def called(function: Callable[..., Any], *args: Any, **offered: Any) -> Any:
    """Call a function with the offered arguments for which it has parameters.

    Args:
        function: function of the user.
        args: arguments that it always gets.
        offered: offered arguments by name.
    """
    names = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values()):
        return function(*args, **offered)
    return function(*args, **{name: value for name, value in offered.items() if name in names})


def batch_size(what: str, size: int | None, workers: int) -> int | None:
    """Return a worker's part of a batch.

    Args:
        what: name of the argument, for errors.
        size: size of the whole batch, or None.
        workers: number of workers that share the batch.

    Raises:
        ValueError: the size is not divisible by the number of workers.
    """
    if size is None:
        return None
    if size < 1 or size % workers:
        raise ValueError(f"{what}={size} cannot be divided evenly among {workers} workers")
    return size // workers


def next_batches(
    input_fn: Callable[..., Any],
    mode: str,
    params: dict[str, Any],
    config: Any,
    input_context: Any,
    prefetch_depth: int | None,
    replicas: int = 1,
) -> list[tuple[Any, Any]]:
    """Call an input function, and add operations to the graph that get one batch per replica.

    Args:
        input_fn: returns a Dataset; gets mode, params, config and input_context if it declares them.
        mode: one of ``ModeKeys``.
        params: hyperparameters, with ``batch_size`` if the Estimator was given one.
        config: the RunConfig.
        input_context: describes this worker's part of the data, or None.
        prefetch_depth: batches to prepare ahead.
        replicas: number of replicas of this worker.

    Returns:
        Features and labels of each replica; the graph's table initializer initialises the iterator.

    Raises:
        ValueError: ``input_fn`` returned no Dataset, or does not take the parameters that it needs.
    """
    names = inspect.signature(input_fn).parameters
    takes_params = "params" in names or any(p.kind is p.VAR_KEYWORD for p in names.values())
    if "batch_size" in params and not takes_params:
        raise ValueError("input_fn must take params, where the batch size of the Estimator arrives as 'batch_size'")
    offered = {"mode": mode, "params": params, "config": config}
    if input_context is not None or ("input_context" in names and names["input_context"].default is inspect._empty):
        offered["input_context"] = input_context or tf.distribute.InputContext()
    with tf.device("/device:CPU:0"):
        dataset = called(input_fn, **offered)
        if not isinstance(dataset, tf.data.Dataset):
            raise ValueError(f"input_fn must return a tf.data.Dataset. Received: {type(dataset).__name__}")
        iterator = v1.data.make_initializable_iterator(dataset.prefetch(prefetch_depth or replicas))
        v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
        batches: list[Any] = []
        for _ in range(replicas):  # in sequence, so that each replica always gets the same batches
            with tf.control_dependencies([leaf.op for leaf in tf.nest.flatten(batches[-1:], expand_composites=True)]):
                batches.append(iterator.get_next())
    pairs = [batch if isinstance(batch, tuple) and len(batch) == 2 else (batch, None) for batch in batches]
    return [(features, None if mode == ModeKeys.PREDICT else labels) for features, labels in pairs]
