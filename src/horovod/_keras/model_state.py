"""State of a model and its optimizer, for both Keras 3 and tf_keras."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from horovod import context
from horovod._keras.callbacks import Kit
from horovod._keras.settings import alone
from horovod._keras.unsafe import accumulated_gradients, passes, set_back
from horovod.bindings.elastic.generators import BUILT_IN
from horovod.bindings.elastic.variables import VariablesState
from horovod.bindings.misuse import type_name, wrong_argument

__all__ = ["ModelState"]


class ModelState(VariablesState):
    """State of a Keras model and its optimizer.

    On TensorFlow and JAX a commit keeps the present values without a copy: the next step writes to other memory.
    Weights and the optimizer are equal on all ranks; random states of layers and metrics stay local.

    Args:
        model: the trained model; it must be built.
        optimizer: the optimizer; by default that of the model. The state also holds those that other attributes of the
            model have by then, as a GAN's.
        backend: accepted and ignored.
        **kwargs: attributes of the state, such as ``epoch=0, batch=0``; they are saved and synchronized, too.

    Raises:
        RequestError: the model is not built, so that it has no variables yet.
        NotImplementedError: tf_keras with several passes per step, in an elastic job.
    """

    _kit: Kit
    _fit_kit: Any
    epoch: int
    batch: int
    #: Whether the ranks are inside ``fit``, so that a new rank joins them there.
    _fit_goes_on: bool
    #: Whether callbacks have been told that the epoch begins.
    _epoch_has_begun: bool
    #: Argument ``epochs`` of the ``fit`` that has trained all, or that a callback has stopped; 0 when it has returned.
    _fit_over: int
    #: Epoch and batch at which each ``fit`` has stopped, or will at the latest, by its argument ``epochs``.
    _fit_stops: dict[int, tuple[int, int]]
    #: Position of ``fit`` in its data.
    _fit_place: Any
    #: Keras' history of the last ``fit`` that trained.
    _history: Any = None
    #: Keras' history of a ``fit`` that a loss has interrupted.
    _interrupted: Any = None
    #: Its callbacks that have begun.
    _begun: Sequence[Any] = ()
    #: The metrics of the last epoch's training.
    _fit_logs: Any = None
    #: The logs at the end of the last epoch.
    _last_logs: Any = None
    #: ``progress`` before the step of ``fit`` that was interrupted last, and this rank's batches of it.
    _missed: tuple[int, list[Any]] = 0, []
    _has_met = False

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not hasattr(model, "built"):
            raise wrong_argument(f"{type(self).__name__} needs a model of Keras. Received: {type_name(model)}")
        if not model.built:
            raise wrong_argument(
                f"{type(self).__name__} needs a model that is built, and {model.name} has no variables yet; give it an "
                "Input, or call it on a batch before"
            )
        self._generators = (*BUILT_IN, *self._kit.backend.generators)
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        # A `train_step` of the model's own may use more.
        others = _leaves([value for name, value in vars(model).items() if name != "optimizer"])
        found = [self.optimizer, *(each for each in others if hasattr(each, "apply_gradients"))]
        self._optimizers = list({id(each): each for each in found if each is not None}.values())
        for each in self._optimizers:
            self._kit.build(each, model.trainable_variables)
        settings = getattr(self.optimizer, "_settings", None)
        is_legacy = hasattr(self.optimizer, "_agg_helper")
        if context.is_elastic() and is_legacy and settings is not None and settings.passes > 1:
            raise NotImplementedError(
                "an elastic job with an optimizer of tf_keras and backward_passes_per_step > 1: a rank that joins "
                "would not have its sums. Use Keras 3 with gradient_accumulation_steps"
            )
        of_fit = {
            "_epoch_has_begun": False, "_fit_goes_on": False, "_fit_over": 0, "_fit_stops": {}, "_fit_place": None,
        }  # fmt: skip
        super().__init__(**{"epoch": 0, "batch": 0, **of_fit, **kwargs})

    def _shared(self) -> list[Any]:
        return [*self.model.weights, *self._of_optimizers()]

    def _equal(self) -> list[Any]:
        # Moving averages differ between ranks until a sync.
        return self._without_sums([*self.model.trainable_weights, *self._of_optimizers()])

    def _own(self) -> list[Any]:
        """Return random states, metrics, and states of recurrent layers, which Keras does not count as variables."""
        shared = {id(variable) for variable in self._shared()}
        every = [*self.model.variables, *(v for metric in self.model.metrics for v in metric.variables)]
        layers = list(self.model._flatten_layers())
        # tf_keras has these after tf.keras.backend.experimental.enable_tf_random_generator().
        random = [getattr(layer, "_random_generator", None) for layer in layers]
        every += [made.state for each in random if (made := getattr(each, "_generator", None)) is not None]
        states = _leaves([getattr(layer, "states", None) for layer in layers])
        every += [state for state in states if self._kit.is_variable(state)]
        return [variable for variable in every if id(variable) not in shared]

    def _of_optimizers(self) -> list[Any]:
        found: list[Any] = []
        for optimizer in self._optimizers:
            variables = optimizer.variables
            found += variables() if callable(variables) else variables
            rate = getattr(self._kit.innermost(optimizer), "learning_rate", None)
            if self._kit.is_variable(rate) and all(variable is not rate for variable in found):
                found.append(rate)  # tf_keras leaves it out
        return found

    def _sums(self) -> Sequence[Any]:
        """Return the gradients that the optimizers have added up since their last update; each rank has its own."""
        return [v for each in self._optimizers for v in accumulated_gradients(self._kit.innermost(each))]

    def _changed_early(self) -> list[Any]:
        if self._kit.backend.changes_all(self._has_stepped):
            return [*self._shared(), *self._own()]
        accumulates = bool(self._sums())
        of_optimizer = [v for v in self._of_optimizers() if accumulates or not len(v.shape)]
        return [*self.model.non_trainable_weights, *of_optimizer, *self._own()]

    def _hold(self, variables: Sequence[Any]) -> Sequence[Any]:
        self._settle()
        return self._kit.backend.hold(variables)

    def _put(self, variables: Sequence[Any], held: Sequence[Any]) -> None:
        self._settle()
        self._kit.backend.put(variables, held)

    def _arrays(self, variables: Sequence[Any]) -> Sequence[Any]:
        self._settle()
        return [self._kit.backend.array(variable) for variable in variables]

    def _send(self) -> None:
        self._settle()
        optimizers = [self._kit.innermost(each) for each in self._optimizers]
        done = [passes(each)[0] for each in optimizers]
        self._kit.broadcast(self._without_sums(self._shared()), 0)
        # The sums of a rank count its own samples, until an update, which it may have missed, uses them up.
        for optimizer, before in zip(optimizers, done, strict=True):
            if before < passes(optimizer)[1]:
                self._clear(accumulated_gradients(optimizer))

    def _without_sums(self, variables: Sequence[Any]) -> list[Any]:
        sums = {id(variable) for variable in self._sums()}
        return [variable for variable in variables if id(variable) not in sums]

    def _clear(self, sums: Sequence[Any]) -> None:
        self._put(sums, [np.zeros_like(array) for array in self._arrays(sums)])

    def add_up(self, train: Callable[[list[Any]], Any]) -> None:
        """Add up the gradients of a step that this rank has missed, if it has received the other values of it since.

        Args:
            train: trains on batches.
        """
        (progress, batches), self._missed = self._missed, (0, [])
        inner = self._kit.innermost(self.optimizer)
        done, updated = passes(inner)
        # An update in the step has used up the gradients of those before.
        if self.progress > progress and (count := min(done - updated, len(batches))):
            kept = self._without_sums(self._shared())
            held = self._hold(kept)
            set_back(inner, count)
            train(batches[-count:])
            self._put(kept, held)

    def checkpoint(self) -> dict[str, Any]:
        """See ``State``; an epoch of which only the end is missing needs the metrics of its training."""
        logs = {name: _number(value) for name, value in (self._fit_logs or {}).items()}
        return {**super().checkpoint(), "logs": logs}

    def load_checkpoint(self, values: Mapping[str, Any]) -> None:
        """See ``State``."""
        super().load_checkpoint(values)
        self._clear(self._sums())  # those in the file count the samples of one rank
        self._fit_logs = values.get("logs")

    def restore(self) -> None:
        """See ``State``; metrics created after the last ``save`` start again."""
        self._settle()
        for metric in self.model.metrics:
            metric.reset_state()
        super().restore()

    def sync(self) -> None:
        """See ``State``; a step traced before the first rendezvous is traced again."""
        reduction = self._kit.reduction_of(self.optimizer) if context.is_elastic() else None
        if reduction is not None:
            reduction.learn_name()
        if not self._has_met:
            self._has_met, self.model.train_function = True, None
        super().sync()

    def on_reset(self) -> None:
        """See ``State``.

        Horovod's scripts train for a step in a callback, in which new ranks do not take part. We undo that step, but
        keep the callback's changes of the learning rate.
        """
        if not self._reset_callbacks:
            super().on_reset()
            return
        kept = [v for v in [*self._shared(), *self._own()] if "learning_rate" not in v.name]
        held, function = self._hold(kept), self.model.train_function
        self.model.train_function = None
        try:
            with alone():
                super().on_reset()
        finally:
            self._put(kept, held)
            self.model.train_function = function

    def _settle(self) -> None:
        """Write values back to the variables: Keras on JAX keeps them elsewhere during ``fit``."""
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()

    def undo(self) -> bool:
        before = len(self._captured[0]) if self._captured else 0
        is_undone = super().undo()
        if not self._has_stepped and len(self._changed_early()) > before:
            # The very first step has created the metrics, so resetting them undoes it.
            self.model.reset_metrics()
            return self._is_unchanged()
        return is_undone


def _leaves(value: Any) -> list[Any]:
    return [leaf for each in value for leaf in _leaves(each)] if isinstance(value, list | tuple) else [value]


def _number(value: Any) -> Any:
    """Return what Keras tells callbacks of a metric: its value as a float, if it has one."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return value
