"""A learning rate that follows the number of ranks, or a number of accumulated batches that makes up for it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from horovod import context

__all__ = ["LearningRateScale", "passes_for"]


class LearningRateScale:
    """Keeps a learning rate in proportion to the number of ranks.

    Make it an attribute of the state, and call ``step()`` before each step of the optimizer. Learning rates are
    multiplied, so schedulers that multiply them, too, can be used beside it.

    Args:
        groups: mappings with a learning rate ``lr``, such as ``optimizer.param_groups``; the rates are those for
            ``reference_size`` ranks.
        reference_size: number of ranks for which the rates are meant.
        ramp_steps: steps after a change until the rate has its new value; it changes evenly.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(self, groups: Sequence[MutableMapping[str, Any]], reference_size: int, ramp_steps: int = 0) -> None:
        if reference_size < 1 or ramp_steps < 0:
            raise ValueError(
                f"reference_size must be 1 or more, ramp_steps 0 or more. Received: {reference_size}, {ramp_steps}"
            )
        self._groups, self._reference, self._ramp = groups, reference_size, ramp_steps
        self._factor, self._target, self._left = 1.0, 1.0, 0

    @property
    def factor(self) -> float:
        """By how much the rates are multiplied now."""
        return self._factor

    def step(self) -> None:
        """Adapt the rates to the present number of ranks."""
        target = context.world().size / self._reference
        if target != self._target:
            self._target, self._left = target, self._ramp
        before = self._factor
        self._factor += (target - before) / (self._left + 1)
        self._left = max(self._left - 1, 0)
        if self._factor != before:
            for group in self._groups:
                group["lr"] = group["lr"] * (self._factor / before)

    def state_dict(self) -> dict[str, float]:
        """Return what ``load_state_dict`` takes; the rates themselves are part of the optimizer's state."""
        return {"factor": self._factor, "target": self._target, "left": self._left}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict()`` was called."""
        self._factor, self._target, self._left = state_dict["factor"], state_dict["target"], state_dict["left"]


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
