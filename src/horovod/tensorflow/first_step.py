"""Warn once if the ranks train different models because the variables were not broadcast.

Scripts broadcast before the first step or, as in Horovod's examples, right after it. So an eager loop is checked in
its second step, and a traced step at the end of its trace, unless the trace contains a broadcast. The warning is
delayed, because a broadcast may follow the trace, or several passes of the first step.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod import context
from horovod.bindings.fingerprints import compare_once
from horovod.bindings.process_sets import ProcessSet, key_of
from horovod.logs import logger

__all__ = ["compare", "note_broadcast", "tensorflows", "warn_now"]

_REMEDY = "hvd.broadcast_variables(model.variables, root_rank=0)"
_HOLD_S = 30.0
#: For each engine, by the first variable's id: a weak reference to it, and the steps that were begun or compared.
_begun: weakref.WeakKeyDictionary[Any, dict[int, tuple[Any, set[Any]]]] = weakref.WeakKeyDictionary()
_broadcasting: weakref.WeakSet[Any] = weakref.WeakSet()
#: Delayed warnings, and the ids of the variables of each.
_held: list[tuple[threading.Timer, set[int]]] = []


def tensorflows(variable: Any) -> Any:
    """Return a TensorFlow variable, or the one inside a Keras variable; ``None`` for other objects."""
    inner = variable if isinstance(variable, tf.Variable) else getattr(variable, "value", None)
    return inner if isinstance(inner, tf.Variable) else None


def note_broadcast(variables: Sequence[Any]) -> None:
    """Record that variables are broadcast, now or by the function being traced."""
    for timer, about in _held:
        if not about.isdisjoint(map(id, variables)):
            timer.cancel()
    if not tf.executing_eagerly() and (graph := _outermost()) is not None:
        _broadcasting.add(graph)


@atexit.register
def warn_now() -> None:
    """Log the delayed warnings now."""
    while _held:
        timer, _ = _held.pop()
        if not timer.finished.is_set():
            timer.cancel()
            timer.function(*timer.args)


def compare(name: str, sources: Sequence[Any] | None, process_set: ProcessSet) -> None:
    """Compare variables with the other ranks' variables once; see the module. Other sources are left out."""
    variables = [found for source in sources or () if (found := tensorflows(source)) is not None]
    if not variables or not process_set.included() or process_set.size() == 1:
        return
    known, first = _begun.setdefault(context.engine(), {}), id(variables[0])
    if first not in known:
        # Python may reuse the id of a deleted variable, and only on some ranks.
        known[first] = weakref.ref(variables[0], lambda _: known.pop(first, None)), set()
    begun, key = known[first][1], (name, len(variables), key_of(process_set))
    if (*key, "compared") in begun:
        return
    if tf.executing_eagerly():
        if key in begun and _compare_now(name, variables, process_set):
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
            if tf.executing_eagerly() and graph not in _broadcasting and _compare_now(name, variables, process_set):
                begun.add((*key, "compared"))

    graph._add_scope_exit_callback(at_end)


def _outermost() -> Any:
    """Return the graph of the outermost traced function; ``None`` in graphs of TensorFlow 1."""
    graph: Any = tf.compat.v1.get_default_graph()
    if not graph.building_function:
        return None
    while graph.outer_graph.building_function:
        graph = graph.outer_graph
    return graph


def _compare_now(name: str, variables: Sequence[Any], process_set: ProcessSet) -> bool:
    """Compare and return True; return False if variables have no values yet, as in the first trace that makes them."""
    if not all(bool(variable.is_initialized()) for variable in variables):
        return False

    def hold_back(*message: Any) -> None:
        timer = threading.Timer(_HOLD_S, logger.warning, message)
        timer.daemon = True
        timer.start()
        _held.append((timer, set(map(id, variables))))

    names = [variable.name for variable in variables]
    compare_once(name, names, lambda: [variable.numpy() for variable in variables], _REMEDY, process_set, hold_back)
    return True
