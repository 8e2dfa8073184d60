"""Several replicas of one process, each in its own thread, run in turn; they synchronize to combine values.

TensorFlow's replicas cannot synchronize in the body of a loop, because each would build its own loop. A device runs
one program on all replicas; so here a loop or branch in which replicas synchronize becomes one for all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.client import session as tf_session
from tensorflow.python.distribute import distribute_lib, distribute_utils, input_lib, mirrored_run, values
from tensorflow.python.framework import ops
from tensorflow.python.ops import cond as tf_cond
from tensorflow.python.ops import while_loop

__all__ = ["call_for_each_replica", "own_context", "prepare", "prepare_iterators"]

#: TensorFlow's name of temporary graphs that only determine the variables defined by a loop.
_TRIED = "tmp"


class _ApartError(BaseException):
    """Control flow: a loop of one replica has reached a synchronization of all. The script must not catch it."""


class _Part(NamedTuple):
    """The loop or branch of one replica.

    Attributes:
        functions: the loop's condition and body, or both branches.
        values: the loop's variables, or the predicate.
        status: AutoGraph's conversion status of the functions.
    """

    functions: tuple[Callable[..., Any], Callable[..., Any]]
    values: Any
    status: ag_ctx.ControlStatusCtx


class _Together:
    """Shared state of the replicas of one call."""

    def __init__(self, count: int) -> None:
        self.parts: list[Any] = [None] * count
        self.results: list[Any] = [None] * count


class _Meeting(distribute_lib.ReplicaContext):
    """Context of a replica that can synchronize with the others in a loop.

    Args:
        mirrored: TensorFlow's context of its thread, in which the thread waits for the others.
        together: shared state of the replicas.
    """

    def __init__(self, mirrored: Any, together: _Together) -> None:
        super().__init__(mirrored.strategy, mirrored._replica_id_in_sync_group)
        self._mirrored = mirrored
        self._together = together
        self._graph = ops.get_default_graph()
        self._is_alone = False

    @property
    def local(self) -> int:
        """Index of this replica in its process."""
        return int(self.strategy.extended._get_local_replica_id(self._replica_id_in_sync_group))

    def _merge_call(self, fn: Any, args: Any, kwargs: Any) -> Any:
        graph = ops.get_default_graph()
        if graph is not self._graph and self._is_alone:
            raise _ApartError
        while graph is not self._graph and graph is not None:
            if graph.name == _TRIED:
                return self._tried(fn, args, kwargs)
            graph = getattr(graph, "outer_graph", None)
        return self._mirrored._merge_call(fn, args, kwargs)

    def _tried(self, fn: Any, args: Any, kwargs: Any) -> Any:
        """Simulate the synchronization with copies of this replica, in a temporary graph."""
        count = len(self._together.parts)
        copies = [
            tf.nest.map_structure(lambda one: tf.identity(one) if isinstance(one, tf.Tensor) else one, (args, kwargs))
            for _ in range(count)
        ]
        args, kwargs = distribute_utils.regroup(tuple(copies))
        distribute_lib._push_per_thread_mode(distribute_lib._CrossReplicaThreadMode(self.strategy))
        try:
            results = fn(self.strategy, *args, **kwargs)
        finally:
            distribute_lib._pop_per_thread_mode()
        return distribute_utils.select_replica(self.local, results)

    def runs_as_one(self, alone: Callable[[], Any], joint: Callable[[list[_Part]], list[Any]], part: _Part) -> Any:
        """Run a loop or branch alone if this replica does not synchronize in it, otherwise one for all replicas.

        Args:
            alone: function that runs it for this replica.
            joint: function that runs it for all replicas; returns the results of each.
            part: loop or branch of this replica.
        """
        if self._is_alone or not self.is_outermost:
            return alone()
        self._is_alone = True
        try:
            return alone()
        except _ApartError:
            pass
        finally:
            self._is_alone = False
        if not pywrap_tfe.TFE_Py_TapeSetIsEmpty():
            raise RuntimeError(
                "replicas of one process combine values inside of a loop or a branch that a GradientTape outside of "
                "it records. Open the tape inside of it"
            )
        return self._joined(joint, part)

    @property
    def is_outermost(self) -> bool:
        """Return whether replicas can synchronize in the graph under construction."""
        return not tf.executing_eagerly() and ops.get_default_graph() is self._graph

    def loop(self, cond: Callable[..., Any], body: Callable[..., Any], loop_vars: Sequence[Any]) -> Any:
        """Run one loop for all replicas, without testing whether they synchronize in it.

        Args:
            cond: condition of the loop; that of the first replica is used.
            body: body of this replica.
            loop_vars: loop variables of this replica.
        """
        plain, _ = while_loop._khorovod_plain
        part = _Part((cond, body), (loop_vars, None), ag_ctx.control_status_ctx())
        return self._joined(functools.partial(_joint_loop, plain, {}, True), part)

    def _joined(self, joint: Callable[[list[_Part]], list[Any]], part: _Part) -> Any:
        together = self._together
        together.parts[self.local] = part

        def of_all(strategy: Any) -> None:
            together.results = joint(list(together.parts))

        self._mirrored._merge_call(of_all, (), {})
        return together.results[self.local]


def call_for_each_replica(strategy: Any, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function for each replica of this process.

    Args:
        strategy: strategy of the replicas.
        fn: the function.
        args: its arguments; each replica gets its own part.
        kwargs: its keyword arguments; each replica gets its own part.
    """
    if not tf.executing_eagerly():
        fn = autograph.tf_convert(fn, ag_ctx.control_status_ctx())
    together = _Together(len(strategy.extended.worker_devices))

    def of_one(*args: Any, **kwargs: Any) -> Any:
        with _Meeting(tf.distribute.get_replica_context(), together):
            return fn(*args, **kwargs)

    return mirrored_run._call_for_each_replica(strategy, of_one, args or (), kwargs or {})


def _on_each(status: ag_ctx.ControlStatusCtx, functions: Sequence[Callable[[], Any]]) -> tuple[Any, ...]:
    """Call one function for each replica, in the graph under construction; return the results of each."""
    results: list[Any] = [None] * len(functions)
    strategy = tf.distribute.get_strategy()

    def own() -> None:
        local = tf.distribute.get_replica_context().local
        with ag_ctx.ControlStatusCtx(status.status, status.options):
            results[local] = functions[local]()

    call_for_each_replica(strategy, tf.autograph.experimental.do_not_convert(own), (), {})
    return tuple(results)


def own_context() -> Any:
    """Return the context of this replica if the process has several, else None."""
    context = tf.distribute.get_replica_context()
    return context if isinstance(context, _Meeting) else None


def prepare() -> None:
    """Enable replicas of one process to synchronize in TensorFlow's loops and branches; call it once per process."""
    if hasattr(while_loop, "_khorovod_plain"):
        return
    while_loop._khorovod_plain = (plain_loop, plain_branch) = (while_loop.while_loop, tf_cond.cond)
    # For all replicas, a device returns only the result of the first one.
    tf_session.register_session_run_conversion_functions(
        values.PerReplica, lambda held: (list(held.values), lambda fetched: fetched[0])
    )

    @functools.wraps(plain_loop)
    def loop(cond: Any, body: Any, loop_vars: Any, shape_invariants: Any = None, *args: Any, **kwargs: Any) -> Any:
        alone = functools.partial(plain_loop, cond, body, loop_vars, shape_invariants, *args, **kwargs)
        context = own_context()
        if context is None:
            return alone()
        part = _Part((cond, body), (loop_vars, shape_invariants), ag_ctx.control_status_ctx())
        options = {"maximum_iterations": kwargs.get("maximum_iterations"), "name": kwargs.get("name")}
        joint = functools.partial(_joint_loop, plain_loop, options, bool(kwargs.get("return_same_structure")))
        return context.runs_as_one(alone, joint, part)

    @functools.wraps(plain_branch)
    def branch(pred: Any, true_fn: Any = None, false_fn: Any = None, strict: Any = False, *args: Any, **kw: Any) -> Any:
        alone = functools.partial(plain_branch, pred, true_fn, false_fn, strict, *args, **kw)
        context = own_context()
        if context is None or true_fn is None or false_fn is None:
            return alone()
        part = _Part((true_fn, false_fn), pred, ag_ctx.control_status_ctx())
        return context.runs_as_one(alone, functools.partial(_joint_branch, plain_branch, strict), part)

    while_loop.while_loop, tf_cond.cond = loop, branch


def _joint_loop(plain: Any, options: Any, keeps_structure: bool, parts: list[_Part]) -> list[Any]:
    """Build one loop for all replicas; the first replica's condition ends it."""
    status = parts[0].status
    given = [tuple(part.values[0]) for part in parts]
    invariants = [part.values[1] for part in parts]

    def lasts(*each: Any) -> Any:
        with ag_ctx.ControlStatusCtx(status.status, status.options):
            return parts[0].functions[0](*each[0])

    def once(*each: Any) -> Any:
        bodies = [functools.partial(part.functions[1], *own) for part, own in zip(parts, each, strict=True)]
        found = _on_each(status, bodies)
        return tuple(tuple(one) if isinstance(one, (list, tuple)) else (one,) for one in found)

    shapes = None if invariants[0] is None else tuple(tuple(own) for own in invariants)
    results = plain(
        lasts, once, tuple(given), shape_invariants=shapes, parallel_iterations=1, return_same_structure=True, **options
    )
    return [own[0] if len(own) == 1 and not keeps_structure else own for own in results]


def _joint_branch(plain: Any, strict: bool, parts: list[_Part]) -> list[Any]:
    """Build one branch for all replicas; the first replica's predicate selects it."""
    branches = [
        functools.partial(_on_each, parts[0].status, [part.functions[which] for part in parts]) for which in (0, 1)
    ]
    results = plain(parts[0].values, *branches, strict=True)
    is_one = [isinstance(own, (list, tuple)) and len(own) == 1 and not strict for own in results]
    return [own[0] if one else own for own, one in zip(results, is_one, strict=True)]


def prepare_iterators(strategies: type) -> None:
    """Enable replicas to take the next batch of a distributed dataset, as in the SDK; call it once per process."""
    base = input_lib.DistributedIteratorBase
    if hasattr(base, "_khorovod_plain"):
        return
    base._khorovod_plain = plain = base.get_next

    @functools.wraps(plain)
    def get_next(self: Any, name: Any = None) -> Any:
        strategy, extended = self._strategy, self._strategy.extended
        context: Any = tf.distribute.get_replica_context()
        if not isinstance(strategy, strategies) or context is None or context.strategy is not strategy:
            return plain(self, name)
        batches = context.merge_call(lambda strategy: plain(self, name))
        local = extended._get_local_replica_id(context._replica_id_in_sync_group)
        return distribute_utils.select_replica(local, batches)

    base.get_next = get_next
