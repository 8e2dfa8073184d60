"""Methods of distributed optimizers of Keras 3; they override those of the optimizer's own class.

Keras applies gradients in ``apply``, on all backends and in custom loops, so they are combined there: after
loss scaling has checked them, before they are clipped. If an optimizer accumulates gradients over several
passes, Keras clips the accumulated sums, so they are combined just before that, once per update.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from horovod._keras.reduction import REMEDY, GradientReduction
from horovod.core.requests import ReduceOp
from horovod.logs import logger

__all__ = ["Distributed", "DistributedMembers", "make_distributed"]


class _CallableList(list[Any]):
    """A list that old scripts may also call like a method; the call returns the list."""

    def __call__(self) -> _CallableList:
        return self


class Distributed:
    """Base of distributed optimizers of any Keras."""

    _reduction: GradientReduction

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of a variable local: it is not combined over ranks.

        Args:
            var: a variable of the model.
        """
        self._reduction.register_local(var)

    def _end(self) -> None:
        """Check the end of ``fit()``; after a failure, raise that instead: not all backends get here then."""
        failure = _passing_through_keras()
        if failure is None:
            self._reduction.agree_on_end("fit()")
        else:
            self._reduction.backend.reraise(failure)


def _passing_through_keras() -> BaseException | None:
    """Return the exception for which the calling Keras code is cleaning up; not one that the user is handling."""
    error = sys.exc_info()[1]
    frame: FrameType | None = sys._getframe(3)
    while error is not None and frame is not None and frame.f_globals.get("__name__", "").startswith("keras."):
        if error.__traceback__ is not None and error.__traceback__.tb_frame is frame:
            return error
        frame = frame.f_back
    return None


def make_distributed(optimizer: Any, members: type[Distributed], reduction: GradientReduction) -> None:
    """Change an optimizer's class to one that derives from ``members`` and its own class; it keeps its variables.

    An optimizer that is distributed already gets the new settings; gradients are still combined only once.
    """
    plain: Any = optimizer.__class__
    own = {
        "__doc__": plain.__doc__,
        "__module__": __name__,
        # Saved files then name the plain class, so that Keras can load them without horovod.
        "__class__": property(lambda self: plain),
    }
    # Set it through ``object``: an already distributed optimizer overrides ``__class__`` with a property.
    object.__dict__["__class__"].__set__(optimizer, type(plain.__name__, (members, plain), own))
    # Write to ``__dict__`` to bypass Keras' and TensorFlow's attribute tracking.
    optimizer.__dict__["_reduction"] = reduction


class DistributedMembers(Distributed):
    """See the module; for Keras 3."""

    _applying: tuple[Any, ...] = ()

    gradient_accumulation_steps: int | None
    built: bool
    name: str
    _iterations: Any
    _trainable_variables: list[Any]
    _get_variable_index: Callable[[Any], int]
    _var_key: Callable[[Any], Any]
    build: Callable[[list[Any]], None]

    @property
    def variables(self) -> list[Any]:
        """All variables of the optimizer; the list is also callable, as in Keras 2."""
        return _CallableList(super().variables)  # type: ignore[misc]

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Update variables with the combined gradients; takes the arguments of the optimizer's own class."""
        try:
            return self._apply_combined(list(grads), trainable_variables)
        except KeyboardInterrupt:
            logger.warning(
                "an interrupt has ended a step of %s between its gradients and its update, which other ranks may have "
                "made: before training goes on, call %s",
                self.name,
                REMEDY,
            )
            raise

    def _apply_combined(self, grads: list[Any], trainable_variables: Sequence[Any] | None) -> Any:
        variables = self._known(grads, trainable_variables)
        if not variables:
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        self._reduction.prepare(self._trainable_variables)
        # Some "gradients" are new values, such as scales of 8-bit numbers: take their maximum, not a sum.
        overwritten = [i for i, v in enumerate(variables) if getattr(v, "overwrite_with_gradient", False)]
        values = [i for i in overwritten if grads[i] is not None]
        shared = [i for i in range(len(grads)) if i not in set(values)]
        self._combine(grads, variables, values, ReduceOp.MAX)
        if self.gradient_accumulation_steps:
            self.__dict__["_applying"] = tuple(variables[i] for i in shared if grads[i] is not None)
        else:
            self._combine(grads, variables, shared)
        return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _known(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None) -> list[Any]:
        """Return the gradients' variables, built; an empty list for invalid arguments, for which Keras raises."""
        if trainable_variables is None:
            known = list(self._trainable_variables) if self.built else []
            return known if len(known) == len(grads) else []
        variables = list(trainable_variables)
        if not self.built and grads:
            with self._reduction.backend.outside():
                self.build(variables)
            self.built = True
        keys = {self._var_key(variable) for variable in self._trainable_variables}
        return variables if len(variables) == len(grads) and keys.issuperset(map(self._var_key, variables)) else []

    def _combine(self, grads: list[Any], variables: Sequence[Any], which: Sequence[int], op: Any = None) -> None:
        if not which:
            return
        numbers = [self._get_variable_index(variables[i]) for i in which]
        parts = [grads[i] for i in which], [variables[i] for i in which]
        for i, gradient in zip(which, self._reduction.combine(*parts, numbers, op), strict=True):
            grads[i] = gradient

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        """Combine gradients accumulated over several passes; without accumulation, ``apply`` has combined them."""
        steps = self.gradient_accumulation_steps
        if not steps or not self._applying:
            return super()._clip_gradients(grads)  # type: ignore[misc]
        variables, found = self._applying, list(grads)

        def combine() -> list[Any]:
            self._combine(found, variables, range(len(found)))
            return found

        combined = self._reduction.backend.in_last_pass(self._iterations, steps, combine, list(grads))
        return super()._clip_gradients(combined)  # type: ignore[misc]

    def finalize_variable_values(self, var_list: Any) -> Any:
        """Finish ``fit()``, and check that all ranks have taken the same number of steps."""
        self._end()
        return super().finalize_variable_values(var_list)  # type: ignore[misc]
