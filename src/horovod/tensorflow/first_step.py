"""Warn once if the ranks train different models, because nobody broadcast the variables.

Scripts broadcast before the first step or, as Horovod's examples do, right after it. So an eager loop is checked in its
second step, and a traced step at the end of its trace, unless it broadcasts by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod import context
from horovod.bindings.fingerprints import compare_once
from horovod.bindings.process_sets import ProcessSet

__all__ = ["compare", "note_broadcast", "tensorflows"]

_REMEDY = "hvd.broadcast_variables(model.variables, root_rank=0)"
#: For each engine the steps that were begun; for each graph those whose variables it compares at its end.
_begun: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()
_broadcasting: weakref.WeakSet[Any] = weakref.WeakSet()


def tensorflows(variable: Any) -> Any:
    """Return TensorFlow's variable, which one of Keras holds; ``None`` for anything else."""
    inner = variable if isinstance(variable, tf.Variable) else getattr(variable, "value", None)
    return inner if isinstance(inner, tf.Variable) else None


def note_broadcast() -> None:
    """Note that the function that is traced broadcasts variables."""
    if (graph := _outermost()) is not None:
        _broadcasting.add(graph)


def compare(name: str, sources: Sequence[Any] | None, process_set: ProcessSet) -> None:
    """Compare variables with those of other ranks, once; see the module.

    Args:
        name: begins the key of the match.
        sources: what gradients are computed for; those that are no variables may differ.
        process_set: ranks that train them.
    """
    if not sources or not process_set.included() or process_set.size() == 1:
        return
    key, begun = (name, len(sources), id(sources[0])), _begun.setdefault(context.engine(), set())
    if (*key, "compared") in begun:
        return
    if tf.executing_eagerly():
        if key in begun and _compare_now(name, sources, process_set):
            begun.add((*key, "compared"))
        begun.add(key)
        return
    graph = _outermost()
    if graph is None or (graph, key) in begun:
        return
    begun.add((graph, key))

    def at_end() -> None:
        begun.discard((graph, key))
        with tf.init_scope():
            if tf.executing_eagerly() and graph not in _broadcasting and _compare_now(name, sources, process_set):
                begun.add((*key, "compared"))

    graph._add_scope_exit_callback(at_end)


def _outermost() -> Any:
    """Return the function that is traced, not one that it calls; ``None`` in graphs of TensorFlow 1."""
    graph: Any = tf.compat.v1.get_default_graph()
    if not graph.building_function:
        return None
    while graph.outer_graph.building_function:
        graph = graph.outer_graph
    return graph


def _compare_now(name: str, sources: Sequence[Any], process_set: ProcessSet) -> bool:
    """Return whether the variables have values; they have none in the first of two traces of a step that makes them."""
    variables = [found for source in sources if (found := tensorflows(source)) is not None]
    if not all(bool(variable.is_initialized()) for variable in variables):
        return False
    if variables:
        names = [variable.name for variable in variables]
        compare_once(name, names, lambda: [variable.numpy() for variable in variables], _REMEDY, process_set)
    return True
