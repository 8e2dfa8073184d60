"""Reduction of the gradients of one step: their grouping into buckets, and the operations.

Gradients that become ready one after the other share a bucket, and each bucket is one operation, which runs
while backward still computes the next bucket's gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from horovod import context
from horovod.bindings.compression import check_compression
from horovod.bindings.gradients.layout import Item, plan_buckets
from horovod.bindings.gradients.parameters import in_words
from horovod.bindings.gradients.settings import ReduceSettings
from horovod.core.requests import ReduceOp
from horovod.errors import RequestError
from horovod.splits import split_evenly
from horovod.tensorflow import collectives
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.first_step import compare, tensorflows
from horovod.tensorflow.nodes import is_recorded
from horovod.tensorflow.runtime import comm
from horovod.tensorflow.sparse import allreduce_slices, densified

__all__ = ["GradientSettings", "described", "divided", "key_of", "make_reducer", "reduce_gradients", "together"]


def key_of(variable: Any) -> int:
    """Return an id of a variable; the same for a Keras variable and the TensorFlow variable inside it."""
    inner = tensorflows(variable)
    return id(variable if inner is None else inner)


@dataclass(frozen=True)
class GradientSettings(ReduceSettings):
    """Settings of the reduction of gradients."""

    compression: type[Compressor] = Compression.none
    name: str = "gradients"  # prefix of the keys of the match
    # number of groups, or groups of variables; None groups automatically
    groups: int | Sequence[Sequence[Any]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_compression(self.compression)
        groups = self.groups
        is_count = isinstance(groups, int) and groups > 0
        is_list = isinstance(groups, list | tuple) and all(isinstance(group, list | tuple) for group in groups)
        if groups is not None and not is_count and not is_list:
            raise ValueError(
                f"groups should be a positive integer or a list of lists of variables. Received: {in_words(groups)}"
            )


def reduce_gradients(
    settings: GradientSettings, grads: Sequence[Any], variables: Sequence[Any] | None = None
) -> list[Any]:
    """Combine gradients, in the same order on all ranks, over all ranks; None stays None."""
    results: list[Any] = list(grads)
    present = [index for index, grad in enumerate(grads) if grad is not None]
    if settings.sparse_as_dense:
        for index in present:
            results[index] = densified(results[index])
    if settings.process_set.size() == 1 and not context.is_elastic():
        return results
    parts = described(results)
    sparse = [index for index in present if isinstance(results[index], tf.IndexedSlices)]
    dense = [index for index in present if not isinstance(results[index], tf.IndexedSlices)]
    contexts: dict[int, Any] = {}
    for index in dense:
        results[index], contexts[index] = settings.compression.compress(tf.convert_to_tensor(results[index]))
    buckets = _plan(settings, dense, results, variables)
    for bucket, reduced in zip(buckets, _reduce_all(settings, buckets, results, parts), strict=True):
        for index, tensor in zip(bucket, reduced, strict=True):
            results[index] = settings.compression.decompress(tensor, contexts[index])
    for number, index in enumerate(sparse):
        name = f"{settings.name}.sparse.{number}"
        results[index] = allreduce_slices([results[index]], settings, name, False, parts)[0]
    return together(results)


def described(gradients: Sequence[Any]) -> str:
    """Say which gradients there are, and which are sparse, so that ranks do not mix those of different variables."""
    present = [index for index, gradient in enumerate(gradients) if gradient is not None]
    last = max(present, default=-1)
    missing = ", ".join(str(index) for index in sorted(set(range(last)).difference(present)))
    sparse = ", ".join(str(index) for index in present if isinstance(gradients[index], tf.IndexedSlices))
    which = f"variables 0 to {last}" if last else "variable 0"
    return f"gradients of {which}{missing and f' without {missing}'}{sparse and f', sparse ones of {sparse}'}"


def together(gradients: Sequence[Any]) -> list[Any]:
    """Return the gradients so that, in an elastic job's graph, each is there only when the last one has arrived.

    Then no variable has changed when a gradient fails, and the step can be repeated.
    """
    if tf.executing_eagerly() or not context.is_elastic():
        return list(gradients)
    present = [gradient for gradient in gradients if gradient is not None]
    with tf.control_dependencies(tf.nest.flatten(present, expand_composites=True)):
        return [None if gradient is None else tf.identity(gradient) for gradient in gradients]


def _reduce_all(
    settings: GradientSettings, buckets: list[list[int]], tensors: Sequence[Any], parts: str
) -> Iterable[list[Any]]:
    # Ranks with different gradients have different numbers of buckets, but all have the first one.
    names = [f"{settings.name}.{number}" for number in range(len(buckets))]
    if not tf.executing_eagerly() or is_recorded([tensors[index] for bucket in buckets for index in bucket]):
        return [
            collectives.allreduce([tensors[index] for index in bucket], settings, name, parts=parts)
            for name, bucket in zip(names, buckets, strict=True)
        ]
    handles = [
        collectives.start_allreduce([tensors[index] for index in bucket], settings, name, parts)
        for name, bucket in zip(names, buckets, strict=True)
    ]
    return [comm.synchronize(handle) for handle in handles]


def _plan(
    settings: GradientSettings, dense: list[int], tensors: Sequence[Any], variables: Sequence[Any] | None
) -> list[list[int]]:
    """Return the indexes of each bucket, in the order in which backward completes them."""
    if settings.op is ReduceOp.ADASUM:
        return [[index] for index in reversed(dense)]
    groups: list[list[int]] = []
    if isinstance(settings.groups, int):
        groups = [[dense[place] for place in run] for run in split_evenly(len(dense), settings.groups)]
    elif settings.groups:
        if variables is None:
            raise RequestError("groups of variables were given, but not the variables that the gradients belong to")
        place = {key_of(variable): index for index, variable in enumerate(variables)}
        # Ignore variables that this step does not use: a script may train a part of the model separately.
        groups = [[place[key] for key in map(key_of, group) if key in place] for group in settings.groups]
    items = [
        Item(index, tensors[index].shape.num_elements() or 1, tensors[index].dtype.size, tensors[index].dtype)
        for index in reversed(dense)
    ]
    bucket_bytes = context.config().bucket_bytes
    return [list(layout.indexes) for layout in plan_buckets(items, bucket_bytes, groups)]


def divided(grad: Any, by: int) -> Any:
    """Return a gradient, dense or not, divided by a number; None stays None."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(divided(grad.values, by), grad.indices, grad.dense_shape)
    return None if grad is None else grad / tf.cast(by, grad.dtype)


def make_reducer(settings: GradientSettings) -> Callable[..., list[Any]]:
    """Return ``fn(grads, variables=None)``; see ``reduce_gradients``."""

    @collectives.speaks_tensorflow
    def reduce(grads: Sequence[Any], variables: Sequence[Any] | None = None) -> list[Any]:
        compare(settings.name, variables, settings.process_set)
        return reduce_gradients(settings, grads, variables)

    return reduce
