"""``fit`` that recovers internally when ranks are lost or join, for both Keras 3 and tf_keras.

It calls Keras' own ``fit`` for one epoch after the other, with a train function that takes its batches from a shard:
the remaining batches of an epoch depend on the number of ranks. A step interrupted by a lost rank is undone, and
repeated with the batches that the shard deals to the present ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from horovod import context
from horovod._keras.callbacks import BroadcastGlobalVariablesCallback
from horovod._keras.elastic_callbacks import EpochIsOver, UpdateBatchStateCallback, UpdateEpochStateCallback
from horovod._keras.model_state import ModelState
from horovod.bindings.elastic.rates import rate_of, set_rate
from horovod.bindings.elastic.run import recover
from horovod.bindings.elastic.shard import ArrayShard
from horovod.bindings.elastic.step import step
from horovod.bindings.misuse import type_name, wrong_argument
from horovod.bindings.objects import broadcast_object
from horovod.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["FitKit", "fit"]

#: Arguments of Keras' ``fit`` that are refused, and the reason or the way out.
_REFUSED = {
    "class_weight": "give sample_weight, with one number for each sample",
    "initial_epoch": "it begins at state.epoch",
    "steps_per_epoch": "an epoch ends when all samples were used",
    "validation_split": "give validation_data",
}


@dataclass(frozen=True)
class FitKit:
    """Functions of one kind of Keras (Keras 3 or tf_keras) that ``fit`` needs."""

    callback_list: Any  # its class `CallbackList`
    convert: Callable[[Any], Any]  # converts a batch to tensors
    # returns, for a model, a function that trains on a list of batches and returns the result of the model's train
    # function
    make_function: Callable[[Any], Callable[[list[Any]], Any]]
    # returns the present result of a model's train function, without a step; the second argument is a batch
    present: Callable[[Any, Any], Any]
    # returns a context in which a model uses a function without arguments as its train function
    installed: Callable[[Any, Callable[[], Any]], Any]
    shard: Callable[[Any, int, bool, int], Any]  # returns this rank's batches of some data
    # a number of steps that no epoch has, if ``fit`` needs one to group steps; the shard ends the epoch
    steps: int | None = None


def fit(
    state: Any, x: Any, y: Any = None, batch_size: int = 32, epochs: int = 1, shuffle: bool = True,
    sample_weight: Any = None, callbacks: Sequence[Any] | None = None, verbose: Any = "auto", seed: int = 0,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Train the model of a state and recover when ranks are lost or join; call it within ``hvd.elastic.run``.

    A step interrupted by a lost rank is undone, and repeated by the surviving ranks. New ranks join between two
    steps. Each sample of an epoch is used once; see ``shard``. ``state.epoch`` and ``state.batch`` are the next
    epoch and batch, and callbacks get the same numbers on all ranks.

    Args:
        state: a ``KerasState`` of a model that is compiled with a ``DistributedOptimizer``.
        x: the whole data, the same on every rank: arrays, or a result of ``shard``.
        y: targets, if ``x`` is arrays.
        batch_size: samples of one rank in a step.
        epochs: number of the last epoch plus one.
        shuffle: whether each epoch has its own random order.
        sample_weight: weights, if ``x`` is arrays.
        callbacks: Keras callbacks. State callbacks are not needed.
        verbose: as for ``model.fit``.
        seed: seed of the random order; the same on every rank.
        **kwargs: arguments for ``model.fit``, such as ``validation_data``.

    Returns:
        Keras' history of the epochs that this process has trained.

    Raises:
        RequestError: an argument is invalid.
    """
    for name in sorted(_REFUSED.keys() & kwargs):
        raise wrong_argument(f"hvd.elastic.fit() takes no {name}: {_REFUSED[name]}")
    if hasattr(x, "on_epoch_end"):  # a PyDataset, or Sequence of tf_keras
        raise wrong_argument(
            f"hvd.elastic.fit() takes arrays or a result of hvd.elastic.shard(), not a {type(x).__name__}, whose "
            "batches cannot be dealt again; call model.fit() inside hvd.elastic.run, with UpdateBatchStateCallback"
        )
    if (y is not None and isinstance(x, ArrayShard)) or (y is None and sample_weight is not None):
        raise wrong_argument(
            "hvd.elastic.fit() takes y if x is arrays, and sample_weight if y is given, too; give shard() a tuple "
            "(x, y) or (x, y, sample_weight)"
        )
    if not isinstance(x, ArrayShard):
        parts = (x,) if y is None else (x, y) if sample_weight is None else (x, y, sample_weight)
        x = state._fit_kit.shard(parts, batch_size, shuffle, seed)
    if any(kind.__name__ == "BackupAndRestore" for c in callbacks or () for kind in type(c).__mro__):
        raise wrong_argument(
            "hvd.elastic.fit() takes no BackupAndRestore, whose file has weights and an epoch of one rank only; "
            "start the job with --checkpoint-dir"
        )
    held, used = map(state._kit.innermost, (state.optimizer, state.model.optimizer))
    if held is not used:
        raise wrong_argument(
            f"hvd.elastic.fit() got a model that was compiled with another optimizer ({type_name(used)}) than its "
            "state holds, so new ranks would not get the values of this one. Change the learning rate without "
            "compile(), or make another state, and a job for each training"
        )
    others = [c for c in callbacks or () if not isinstance(c, UpdateBatchStateCallback | UpdateEpochStateCallback)]
    return _Training(state, x).fit(epochs, others, verbose, kwargs)


class _Training:
    def __init__(self, state: ModelState, data: ArrayShard) -> None:
        self._kit: FitKit = state._fit_kit
        self._state, self.data = state, data
        self.model = state.model
        self._step = step(self._once)
        self._batches: Iterator[Any] = iter(())
        #: The batches of the present step, from when it has them until it has trained on them.
        self._taken: list[Any] = []
        self._train: Callable[[list[Any]], Any] = lambda batches: None
        self._result: Any = None
        self._sample: Any = None
        self._history: Any = None
        #: Whether only the end of the epoch is missing: validation, and the callbacks there.
        self.is_at_end = False
        #: Whether this process is new and joins ranks that are already inside ``fit``.
        self._joins = state._fit_goes_on
        self._has_begun = False
        #: Whether an epoch is the first one that begins with a new rank.
        self._meets = context.is_elastic() and min(context.membership().previous) < 0
        #: The callbacks whose ``on_train_begin`` has run, here or in a ``fit`` that a loss has interrupted.
        self._begun = state._begun
        self.offset = self._epochs = 0
        if state._fit_place is not None:
            data.load_state_dict(state._fit_place)

    def fit(self, epochs: int, callbacks: Sequence[Any], verbose: Any, kwargs: Any) -> Any:
        state, model = self._state, self.model
        numbered = _numbered(self._kit.callback_list)(
            callbacks, add_history=True, add_progbar=verbose != 0, model=model, verbose=verbose, epochs=epochs,
            steps=None,
        )  # fmt: skip
        numbered.training, self._history = self, numbered._history
        here = state.epoch, state.batch
        if state._fit_over != epochs and (state.epoch >= epochs or state._fit_stops.get(epochs, here) < here):
            # The ranks are in a later fit() of the training function, with callbacks and a history of its own.
            return state._history or self._history
        state._fit_stops = {**state._fit_stops, epochs: (epochs, 0)}
        self._train, self._epochs = self._kit.make_function(model), epochs
        state.add_up(self._train)
        try:
            with self._kit.installed(model, self._execute), _without_end(model.optimizer):
                while state.epoch < epochs and state._fit_over != epochs:
                    self._fit_epoch(numbered, verbose, kwargs)
                    self._follow()
            if state._fit_over == epochs:
                self._end(numbered)
        except (HorovodInternalError, HostsUpdatedInterrupt):
            state._interrupted, state._begun = self._history if self._has_begun else state._interrupted, self._begun
            raise
        finally:
            state._fit_goes_on = False
        state._interrupted, state._begun, state._fit_over = None, (), 0
        state._fit_stops = {**state._fit_stops, epochs: (state.epoch, state.batch)}
        return state._history or self._history

    def _follow(self) -> None:
        """Follow rank 0 in what callbacks decide, as those of a new rank saw fewer epochs. Collective."""
        state, own = self._state, self._rate()
        state._fit_over, rate = broadcast_object((state._fit_over, own), 0, "elastic.fit.decisions")
        self._set_rate(rate)

    def _end(self, numbered: Any) -> None:
        """End the training. Collective.

        After a loss meanwhile it is called again; callbacks that have all been told are not told twice.
        """
        state, optimizer = self._state, self.model.optimizer
        if hasattr(optimizer, "finalize_variable_values"):
            optimizer.finalize_variable_values(self.model.trainable_weights)
        if self._begun and not self._has_begun:
            numbered.on_train_begin()  # for the history; that of the others has run
        if self._has_begun:
            state._history = self._history
            numbered.end()
            self._begun = ()
        # EarlyStopping restores the best epoch's weights, which a new rank may not have seen.
        state._send()

    def _rate(self) -> float | None:
        """Return the learning rate; None if the optimizer follows a schedule of its own."""
        rate = rate_of(self._state._kit.innermost(self.model.optimizer))
        return None if callable(rate) else rate

    def _set_rate(self, rate: float | None) -> None:
        if rate is not None and rate != self._rate():
            set_rate(self._state._kit.innermost(self.model.optimizer), rate)

    def _fit_epoch(self, numbered: Any, verbose: Any, kwargs: Any) -> None:
        state = self._state
        # All samples of the epoch are used after a loss in its validation or in a callback at its end.
        self.is_at_end = bool(state.batch) and self.data.epoch == state.epoch and self.data.is_done
        place = self.data.state_dict()
        self.data.set_epoch(state.epoch)
        if self.data.is_done:
            raise wrong_argument("hvd.elastic.fit() got data without samples")
        self._sample = sample = self._kit.convert(next(iter(self.data)))
        if self.is_at_end:
            self.data.load_state_dict(place)
        self._deal()
        # Without shuffle=False Keras warns that it does not shuffle the generator; the shard has an order already.
        self.model.fit(
            (sample for _ in itertools.count()), initial_epoch=state.epoch, epochs=state.epoch + 1, shuffle=False,
            steps_per_epoch=self._kit.steps, callbacks=numbered, verbose=verbose, **kwargs,
        )  # fmt: skip

    def _deal(self) -> None:
        self.offset = self._state.batch
        self.data.reset()
        self._batches = iter(self.data)

    # -- steps ---------------------------------------------------------------------------------------------------

    def _execute(self) -> Any:
        """Replace the train function: do a step, and retry it after each lost rank."""
        state = self._state
        if self.is_at_end:
            return self._kit.present(self.model, self._sample)
        while True:
            before, self._result, self._taken = state.progress, None, []
            try:
                return self._step(state)
            except (HorovodInternalError, HostsUpdatedInterrupt) as error:
                state._missed = state.progress, self._taken or self._take()
                recover(state, error)
            state.add_up(self._train)
            if not state._fit_goes_on:
                # Another rank has left fit(), so all ranks restart it.
                raise HostsUpdatedInterrupt()
            assert state._fit_place is not None
            self.data.load_state_dict(state._fit_place)
            self._batches = iter(self.data)
            if state.progress > before:
                # The step is done, here or on the rank whose state this rank has received.
                return self._kit.present(self.model, self._sample) if self._result is None else self._result

    def _once(self, state: ModelState) -> Any:
        with state._kit.backend.typed():
            self._taken = batches = self._take()
            self._result = result = self._train(batches)
        self._taken = []
        self.data.confirm()
        state._fit_place = self.data.state_dict()
        state.batch += len(batches)
        return result

    def _take(self) -> list[Any]:
        """Return this rank's batches of the next step."""
        model = self.model
        count: Any = getattr(model, "steps_per_execution", None) or getattr(model, "_steps_per_execution", 1)
        return [self._kit.convert(batch) for batch in itertools.islice(self._batches, int(count or 1))]

    # -- what callbacks see --------------------------------------------------------------------------------------

    def begin(self, numbered: Any, call: Callable[[], None]) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        callbacks = numbered.callbacks
        for callback in callbacks:
            if isinstance(callback, BroadcastGlobalVariablesCallback):
                callback.joins = self._joins
        # The others keep their counts, such as EarlyStopping's patience; Broadcast meets that of a new rank.
        known = {id(callback) for callback in self._begun if not isinstance(callback, BroadcastGlobalVariablesCallback)}
        numbered.callbacks = [callback for callback in callbacks if id(callback) not in known]
        self._call(call, self._joins)
        numbered.callbacks = self._begun = callbacks
        state, before = self._state, self._state._interrupted
        if before is not None and max(before.epoch, default=-1) < state.epoch:
            self._history.epoch, self._history.history = before.epoch, before.history
        state._fit_place = self.data.state_dict()
        state._fit_goes_on = True

    def begin_epoch(self, call: Callable[[], None]) -> None:
        """Call callbacks at the beginning of an epoch, or of its rest."""
        has_run, meets = self._state._epoch_has_begun, self._meets
        self._call(call, has_run)
        self._state._epoch_has_begun, self._meets = True, False
        if meets and not has_run:
            # SwapEMAWeights takes back what it did at the end of the last epoch, which a new rank has not seen.
            self._state._send()

    def begin_batch(self, call: Callable[[], None]) -> None:
        """Call callbacks before a batch; the first one of a new rank is one that the others have begun."""
        self._call(call, self._joins)
        self._joins = False

    def _call(self, call: Callable[[], None], has_run: bool) -> None:
        """Call callbacks. If they ran before, here or on other ranks, all values have their change already.

        These are the learning rate, velocities that were scaled with it, and weights from a file.
        """
        kept = self._state._shared() if has_run else []
        held = self._state._hold(kept)
        call()
        if has_run:
            self._state._drop_unconfirmed()
            self._state._put(kept, held)

    def keep(self, logs: Any) -> None:
        """Keep the metrics of the epoch, which validation resets."""
        if self.data.is_done:
            self._state._fit_logs = dict(logs or {})

    def agree_on_stop(self) -> None:
        """Raise on all ranks if a callback has stopped only some of them in the middle of the epoch."""
        reduction = self._state._kit.reduction_of(self.model.optimizer)
        if reduction is not None and not (self.is_at_end or self.data.is_done):
            reduction.agree_on_end("hvd.elastic.fit()")

    def whole_logs(self, logs: Any) -> dict[str, Any]:
        """Return the logs of an epoch, with the metrics of its training if only its end was done. Collective."""
        state, whole = self._state, {**(logs or {})}
        if self.is_at_end:
            state._fit_logs = broadcast_object(state._fit_logs, 0, "elastic.fit.logs") or {}
            whole.update(state._fit_logs)
        return whole

    def end_epoch(self, epoch: int, logs: Any) -> None:
        state = self._state
        state._last_logs = logs
        state.epoch, state.batch, state._epoch_has_begun = epoch + 1, 0, False
        # A loss comes to light after validation or later, and must not undo what callbacks have decided.
        state._fit_over = self._epochs if self.model.stop_training or state.epoch >= self._epochs else 0
        self.data.set_epoch(epoch + 1)
        state._fit_place = self.data.state_dict()


@functools.cache
def _numbered(base: Any) -> Any:
    """Return a ``CallbackList`` class with one begin and end for all epochs, and batch numbers of the state."""

    class Numbered(base):
        training: _Training

        def on_train_begin(self, logs: Any = None) -> None:
            self.training.begin(self, lambda: super(Numbered, self).on_train_begin(logs))

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if not self.training.is_at_end:
                self.training.begin_epoch(lambda: super(Numbered, self).on_epoch_begin(epoch, logs))

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if not self.training.is_at_end:
                number = self.training.offset + batch
                self.training.begin_batch(lambda: super(Numbered, self).on_train_batch_begin(number, logs))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if not self.training.is_at_end:
                self.training.keep(logs)
                super().on_train_batch_end(self.training.offset + batch, logs)
            if self.training.data.is_done:
                EpochIsOver.declare(self.training.model)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            EpochIsOver.revoke(self.training.model)
            self.training.agree_on_stop()
            logs = self.training.whole_logs(logs)
            super().on_epoch_end(epoch, logs)
            self.training.end_epoch(epoch, logs)

        def on_train_end(self, logs: Any = None) -> None:
            """Do nothing: ``end`` ends the training after the last epoch."""

        def end(self) -> None:
            super().on_train_end(self.training._state._last_logs)

    return Numbered


@contextmanager
def _without_end(optimizer: Any) -> Iterator[None]:
    """Return a context in which Keras does not finalize the optimizer's variables after each epoch."""
    if not hasattr(optimizer, "finalize_variable_values"):
        yield
        return
    optimizer.__dict__["finalize_variable_values"] = lambda variables: None
    try:
        yield
    finally:
        del optimizer.__dict__["finalize_variable_values"]
