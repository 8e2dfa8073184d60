"""Keep executions with one name in program order on all ranks.

A function may run twice or in a loop, and other nodes may have the same name. Ranks match these executions by their
order, so TensorFlow must not reorder them. TensorFlow keeps the order of operations that use the same resource,
through nested functions, branches and loops. So each name has a token, a resource that its nodes take as an input.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_v2_func_graphs as graphs
from tensorflow.python.ops.resource_variable_ops import ResourceVariable
from tensorflow.python.saved_model import save_context

__all__ = ["derivative_of", "distinct", "has_tokens", "token"]

_UNSAVEABLE = (
    "it holds a collective of horovod, which needs the other ranks of this job. Export an object without the training "
    "function, such as a tf.Module that has the model and the function that predicts"
)
#: Graphs that are part of their outer graph; other functions may be called from anywhere.
_PARTS = (graphs.CondBranchFuncGraph, graphs.WhileBodyFuncGraph, graphs.WhileCondFuncGraph)
_tokens: dict[str, Any] = {}
_forward: ContextVar[Any] = ContextVar("forward", default=None)
_keys: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def distinct(key: str) -> str:
    """Return a key that is unique in this graph; equal on ranks that create their nodes in the same order."""
    keys = _keys.setdefault(tf.compat.v1.get_default_graph(), set())
    number, found = 0, key
    while found in keys:
        number += 1
        found = f"{key}_{number}"
    keys.add(found)
    return found


def has_tokens() -> bool:
    """Return whether TensorFlow keeps an order here: not in graphs of TensorFlow 1, and functions called there."""
    with tf.init_scope():
        return bool(tf.executing_eagerly())


def token(key: str) -> Any:
    """Return the token of a name: the handle of a variable, as an input for a node of this graph.

    ``None`` in graphs of TensorFlow 1, which keep no automatic order, and in functions traced only for saving. ``None``
    also in the derivative of a function, because TensorFlow could not call a derivative with a token inside a branch;
    there all nodes run in program order.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    forward = _forward.get()
    if not graph.building_function or save_context.in_save_context():
        return None
    if forward is not None and forward is not graph and not isinstance(graph, _PARTS):
        return None
    if not has_tokens():
        return None
    if key not in _tokens:
        # Not tf.Variable, which consults the strategy and the enclosing function. The kernels run on the CPU.
        with tf.init_scope(), tf.device("CPU:0"):
            _tokens[key] = ResourceVariable(0.0, trainable=False, name="horovod_order")
    return _captured(graph, _tokens[key].handle)


@contextmanager
def derivative_of(graph: Any) -> Iterator[None]:
    """Return a context in which new nodes belong to the derivative of a node of ``graph``."""
    before = _forward.set(graph)
    try:
        yield
    finally:
        _forward.reset(before)


def _captured(graph: Any, handle: Any) -> Any:
    # Derivatives of branches and loops can capture the token only from their outer graph.
    graph.mark_as_unsaveable(_UNSAVEABLE)
    return graph.capture(_captured(graph.outer_graph, handle) if isinstance(graph, _PARTS) else handle)
