"""Horovod's small helpers for TensorFlow, under the import path that scripts and tests use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from horovod.bindings.gradients.parameters import predivided
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.core.requests import ReduceOp
from horovod.tensorflow import ops
from horovod.tensorflow.compression import Compressor
from horovod.tensorflow.reducing import GradientSettings, make_reducer

__all__ = ["refs_to_vars", "vars_to_refs"]

_executing_eagerly = tf.executing_eagerly
_cache = functools.cache


def _make_subgraph(function: Callable[..., Any]) -> Any:
    return tf.function(function)


def vars_to_refs(variables: Iterable[Any]) -> Any:
    """Return hashable references to variables, for use as dictionary keys.

    Args:
        variables: variables, or lists of them.
    """
    return tuple(vars_to_refs(each) if isinstance(each, list | tuple) else each.ref() for each in variables)


def refs_to_vars(refs: Iterable[Any]) -> Any:
    """Return the variables of references from ``vars_to_refs``.

    Args:
        refs: result of ``vars_to_refs``.
    """
    return [refs_to_vars(each) if isinstance(each, list | tuple) else each.deref() for each in refs]


def _summing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective with the order of arguments of Horovod's private functions, which sum by default."""

    def call(tensor: Any, name: str | None = None, op: int = ReduceOp.SUM, **options: Any) -> Any:
        return function(tensor, name=name, op=op, **options)

    return call


_allreduce = _summing(ops.allreduce)
_grouped_allreduce = _summing(ops.grouped_allreduce)
_reducescatter = _summing(ops.reducescatter)


def _make_allreduce_grads_fn(
    name: str, device_dense: str, device_sparse: str, compression: type[Compressor], sparse_as_dense: bool, op: int,
    gradient_predivide_factor: float, groups: Any, process_set: ProcessSet = global_process_set,
) -> Callable[..., list[Any]]:  # fmt: skip
    factors = predivided(ReduceOp(op), gradient_predivide_factor)
    settings = GradientSettings(ReduceOp(op), *factors, process_set, compression, sparse_as_dense, name, groups or None)
    reduce = make_reducer(settings)

    def allreduce_grads(grads: Sequence[Any], vars: Any = None, use_generic_names: bool = False) -> list[Any]:
        return reduce(grads, vars)

    return allreduce_grads
