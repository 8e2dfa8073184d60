"""A learning rate that follows the number of ranks, or a number of accumulated batches that makes up for it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from horovod import context
from horovod.bindings.misuse import wrong_argument

__all__ = ["LearningRateScale", "passes_for"]


class LearningRateScale:
    """Keeps a learning rate in proportion to the number of ranks.

    Make it an attribute of the state, and call ``step()`` before each step of the optimizer. Learning rates are
    multiplied, so schedulers that multiply them, too, can be used beside it. A failed step leaves them as they were.

    Args:
        groups: what has learning rates, which are those for ``reference_size`` ranks: ``optimizer.param_groups`` of
            PyTorch; an optimizer of Keras or a list of them; nothing, ``()``, where the program itself multiplies its
            updates by what ``step()`` returns, as in JAX.
        reference_size: number of ranks for which the rates are meant.
        ramp_steps: steps after a change until the rate has its new value; it changes evenly.

    Raises:
        ValueError: a number is out of its range.
        RequestError: an optimizer follows a schedule of its own.
    """

    def __init__(self, groups: Any, reference_size: int, ramp_steps: int = 0) -> None:
        if reference_size < 1 or ramp_steps < 0:
            raise ValueError(
                f"reference_size must be 1 or more, ramp_steps 0 or more. Received: {reference_size}, {ramp_steps}"
            )
        self._groups = [groups] if hasattr(groups, "learning_rate") else groups
        self._reference, self._ramp = reference_size, ramp_steps
        self._factor, self._target, self._left = 1.0, 1.0, 0
        #: State and rates after the last step that was done, while another one is under way.
        self._confirmed: tuple[dict[str, float], list[Any]] | None = None
        for group in self._groups:
            _set_rate(group, _rate(group))

    @property
    def factor(self) -> float:
        """By how much the rates are multiplied now."""
        return self._factor

    def step(self) -> float:
        """Adapt the rates to the present number of ranks.

        Returns:
            By how much they are multiplied now.
        """
        rates = [_rate(group) for group in self._groups]
        if self._confirmed is None:
            self._confirmed = self.state_dict(), rates
        target = context.world().size / self._reference
        if target != self._target:
            self._target, self._left = target, self._ramp
        before = self._factor
        self._factor += (target - before) / (self._left + 1)
        self._left = max(self._left - 1, 0)
        if self._factor != before:
            for group, rate in zip(self._groups, rates, strict=True):
                _set_rate(group, rate * (self._factor / before))
        return self._factor

    def confirm(self) -> None:
        """Keep the rates: the step is done; a state calls this."""
        self._confirmed = None

    def reset(self) -> None:
        """Set the rates back to those of the last step that was done; a state calls this."""
        if self._confirmed is not None:
            state, rates = self._confirmed
            self.load_state_dict(state)
            for group, rate in zip(self._groups, rates, strict=True):
                _set_rate(group, rate)

    def state_dict(self) -> dict[str, float]:
        """Return what ``load_state_dict`` takes; the rates themselves are part of the optimizer's state."""
        return {"factor": self._factor, "target": self._target, "left": self._left}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict()`` was called."""
        self._factor, self._target, self._left = state_dict["factor"], state_dict["target"], state_dict["left"]
        self._confirmed = None


def _rate(group: Any) -> Any:
    if isinstance(group, Mapping):
        return group["lr"]
    found = group.learning_rate
    return float(found.numpy() if hasattr(found, "numpy") else found) if not callable(found) else found


def _set_rate(group: Any, rate: Any) -> None:
    if isinstance(group, MutableMapping):
        group["lr"] = rate
    elif callable(rate):
        raise wrong_argument(
            f"LearningRateScale sets the learning rate, but this {type(group).__name__} follows a schedule of its own; "
            "make it with a number as learning_rate"
        )
    else:
        group.learning_rate = rate


def passes_for(global_batch_size: int, batch_size: int) -> int:
    """Return how many batches each rank accumulates so that a step sees at least so many samples, with all ranks.

    Args:
        global_batch_size: samples in a step.
        batch_size: samples of one rank in a backward pass.

    Raises:
        ValueError: a number is less than 1.
    """
    if global_batch_size < 1 or batch_size < 1:
        raise ValueError(f"sizes of batches must be 1 or more. Received: {global_batch_size}, {batch_size}")
    return -(-global_batch_size // (batch_size * context.world().size))
