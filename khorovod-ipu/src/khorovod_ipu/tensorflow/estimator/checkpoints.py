"""Checkpoints of variables that all workers share: worker 0 writes, and all take part."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils, values
from tensorflow.python.training import saver as saver_lib

__all__ = ["CheckpointHook", "TrainingState", "parts"]

v1 = tf.compat.v1


def parts(variable: Any) -> list[Any]:
    """Return the copies of a variable on this worker's replicas.

    Args:
        variable: of a strategy, or not.
    """
    return list(variable.values) if isinstance(variable, values.DistributedVariable) else [variable]


class _Combined(saver_lib.BaseSaverBuilder.SaveableObject):
    """A variable that is combined over the workers when it is read."""

    def __init__(self, variable: Any, combined: Any, workers: int) -> None:
        name = variable.name.partition(":")[0]
        super().__init__(combined, [saver_lib.BaseSaverBuilder.SaveSpec(combined, "", name)], name)
        self._variable = variable
        self._workers = workers

    def restore(self, restored_tensors: Sequence[Any], restored_shapes: Any) -> Any:
        (value,) = restored_tensors
        if self._variable.aggregation == tf.VariableAggregation.SUM:
            value = tf.cast(value / self._workers, value.dtype)
        return tf.group(*[part.assign(value, read_value=False) for part in parts(self._variable)])


class TrainingState:
    """All variables of the graph under construction, with their saving and restoring.

    Args:
        strategy: strategy of the variables, or None.
        keep_max: maximum number of checkpoints to keep.
        keep_every_n_hours: one checkpoint per this many hours is kept for ever.
    """

    def __init__(self, strategy: Any, keep_max: int, keep_every_n_hours: float) -> None:
        variables = _whole(v1.global_variables())
        size = strategy.num_replicas_in_sync if strategy is not None else 1
        shared = [v for v in variables if isinstance(v, values.DistributedVariable)]
        combined = [v for v in shared if not distribute_utils.is_mirrored(v)]
        with tf.name_scope("checkpoint_reads"):
            #: All workers run these together for each checkpoint.
            self.reads = [strategy.extended.read_var(v) for v in combined]
        saved: list[Any] = [v for v in variables if not any(v is c for c in combined)]
        saved += [_Combined(v, read, size) for v, read in zip(combined, self.reads, strict=True)]
        self.saver = v1.train.Saver(saved, max_to_keep=keep_max, keep_checkpoint_every_n_hours=keep_every_n_hours)
        self.same_everywhere = tf.no_op()
        if size > 1:
            collectives = strategy.extended._collectives
            with tf.name_scope("same_everywhere"), tf.device(collectives.host):
                self.same_everywhere = tf.group(*[_same(parts(v), collectives) for v in variables])

    def start(self, session: Any, model_dir: str | None) -> None:
        """Copy worker 0's values to the variables of all workers.

        Args:
            session: session in which the variables are initialised.
            model_dir: folder on worker 0 whose newest checkpoint is restored; None on other workers.
        """
        newest = tf.train.latest_checkpoint(model_dir) if model_dir else None
        if newest:
            self.saver.restore(session, newest)
        session.run(self.same_everywhere)


def _same(held: Sequence[Any], collectives: Any) -> Any:
    """Return an operation that copies worker 0's first part of a variable to all parts."""
    first = held[0].read_value()
    value = collectives.broadcast(first) if collectives.size > 1 else first
    return tf.group(*[part.assign(value, read_value=False) for part in held])


def _whole(variables: Sequence[Any]) -> list[Any]:
    """Return the variables without those that are parts of another variable."""
    inside = {id(part) for v in variables if isinstance(v, values.DistributedVariable) for part in parts(v)}
    return [v for v in variables if id(v) not in inside]


class CheckpointHook(tf.compat.v1.train.SessionRunHook):
    """Writes checkpoints on worker 0; the other workers take part in the collectives for them.

    Args:
        state: state to save.
        model_dir: target folder.
        is_chief: whether this worker writes.
        steps: steps between two checkpoints, or None.
        secs: seconds between two checkpoints, or None.
        listeners: called at every checkpoint, on worker 0.
        collectives: collectives of the workers, or None; with them the workers agree on the time.
    """

    def __init__(
        self,
        state: TrainingState,
        model_dir: str,
        is_chief: bool,
        steps: int | None,
        secs: float | None,
        listeners: Sequence[Any],
        collectives: Any,
    ) -> None:
        self._state = state
        self._path = str(Path(model_dir) / "model.ckpt")
        self._model_dir = model_dir
        self._is_chief = is_chief
        self._steps = steps
        self._secs = secs
        self._listeners = listeners if is_chief else ()
        self._saved_step = -1
        self._saved_at = time.monotonic()
        self._asked: Any = None
        self._due: Any = None
        # Clocks differ between workers: if all take part, worker 0 decides the time.
        if secs is not None and collectives is not None and collectives.size > 1 and state.reads:
            with tf.name_scope("checkpoint_due"), tf.device(collectives.host):
                self._asked = v1.placeholder(tf.int32, [])
                self._due = collectives.broadcast(tf.identity(self._asked))

    def begin(self) -> None:
        """Look up the global step, and begin the listeners."""
        self._global_step = v1.train.get_global_step()
        for listener in self._listeners:
            listener.begin()

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Write the first checkpoint."""
        self._save(session, session.run(self._global_step))

    def before_run(self, run_context: Any) -> Any:
        """Request the step, and whether a checkpoint is due."""
        fetches = {"step": self._global_step}
        if self._asked is None:
            return v1.train.SessionRunArgs(fetches)
        return v1.train.SessionRunArgs({**fetches, "due": self._due}, {self._asked: int(self._is_late())})

    def _is_late(self) -> bool:
        return self._secs is not None and time.monotonic() - self._saved_at >= self._secs

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Write a checkpoint if it is due."""
        # Values fetched together with the step may be older than it.
        step = run_context.session.run(self._global_step)
        if self._steps:
            due = step - max(self._saved_step, 0) >= self._steps
        elif "due" in run_values.results:
            due = bool(run_values.results["due"])
        else:
            due = self._is_late()
        if due and self._save(run_context.session, step):
            run_context.request_stop()

    def end(self, session: Any) -> None:
        """Write the last checkpoint."""
        step = session.run(self._global_step)
        if step != self._saved_step:
            self._save(session, step)
        for listener in self._listeners:
            listener.end(session, step)

    def _save(self, session: Any, step: int) -> bool:
        self._saved_step, self._saved_at = step, time.monotonic()
        if not self._is_chief:
            session.run(self._state.reads)
            return False
        Path(self._model_dir).mkdir(parents=True, exist_ok=True)
        for listener in self._listeners:
            listener.before_save(session, step)
        self._state.saver.save(session, self._path, global_step=step)
        stop = False
        for listener in self._listeners:
            stop = bool(listener.after_save(session, step)) or stop
        return stop
