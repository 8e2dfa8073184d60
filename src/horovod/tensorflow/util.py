"""Horovod's small helpers for TensorFlow, under the import path that scripts and tests use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

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


def _allreduce(
    tensor: Any, name: str | None = None, op: int = ReduceOp.SUM, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    return ops.allreduce(
        tensor, op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor, name=name,
        process_set=process_set, ignore_name_scope=ignore_name_scope,
    )  # fmt: skip


def _grouped_allreduce(
    tensors: Sequence[Any], name: str | None = None, op: int = ReduceOp.SUM, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    return ops.grouped_allreduce(
        tensors, op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor, name=name,
        process_set=process_set, ignore_name_scope=ignore_name_scope,
    )  # fmt: skip


def _reducescatter(
    tensor: Any, name: str | None = None, op: int = ReduceOp.SUM, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Any:  # fmt: skip
    return ops.reducescatter(
        tensor, op=op, name=name, process_set=process_set, ignore_name_scope=ignore_name_scope,
        prescale_factor=prescale_factor, postscale_factor=postscale_factor,
    )  # fmt: skip


def _make_allreduce_grads_fn(
    name: str, device_dense: str, device_sparse: str, compression: type[Compressor], sparse_as_dense: bool, op: int,
    gradient_predivide_factor: float, groups: Any, process_set: ProcessSet = global_process_set,
) -> Callable[..., list[Any]]:  # fmt: skip
    del device_dense, device_sparse
    reduce = make_reducer(
        GradientSettings(
            name, compression, sparse_as_dense, ReduceOp(op), gradient_predivide_factor, groups, process_set
        )
    )

    def allreduce_grads(grads: Sequence[Any], vars: Any = None, use_generic_names: bool = False) -> list[Any]:
        return reduce(grads, vars)

    return allreduce_grads
