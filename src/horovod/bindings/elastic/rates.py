"""A learning rate, or a number of accumulated batches, that follows the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from horovod import context
from horovod.bindings.misuse import wrong_argument

__all__ = ["LearningRateScale", "passes_for", "rate_of", "set_rate"]


class LearningRateScale:
    """Keeps a learning rate in proportion to the number of ranks.

    Make it an attribute of the state, and call ``step()`` before each step of the optimizer. It multiplies the learning
    rates, so it can be combined with schedulers that multiply them too. A failed step leaves the rates unchanged.

    Args:
        groups: objects with learning rates for ``reference_size`` ranks: ``optimizer.param_groups`` of PyTorch; a Keras
            optimizer or a list of them; ``()`` if the program multiplies its updates by ``step()`` itself, as in JAX.
        reference_size: number of ranks for which the learning rates were chosen.
        ramp_steps: number of steps with rates on a straight line from the old to the new one, before the latter holds.

    Raises:
        ValueError: ``reference_size`` or ``ramp_steps`` is out of range.
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
        #: State and rates after the last completed step, while the next step runs.
        self._confirmed: tuple[dict[str, float], list[Any]] | None = None
        for group in self._groups:
            set_rate(group, rate_of(group))

    @property
    def factor(self) -> float:
        """Present factor of the learning rates."""
        return self._factor

    def step(self) -> float:
        """Adapt the rates to the present number of ranks.

        Returns:
            The present factor of the learning rates.
        """
        rates = [rate_of(group) for group in self._groups]
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
                set_rate(group, rate * (self._factor / before))
        return self._factor

    def confirm(self) -> None:
        """Keep the rates of a completed step; the state calls this."""
        self._confirmed = None

    def reset(self) -> None:
        """Restore the rates of the last completed step; the state calls this."""
        if self._confirmed is not None:
            state, rates = self._confirmed
            self.load_state_dict(state)
            for group, rate in zip(self._groups, rates, strict=True):
                set_rate(group, rate)

    def state_dict(self) -> dict[str, float]:
        """Return the state for ``load_state_dict``; the rates themselves are part of the optimizer's state."""
        return {"factor": self._factor, "target": self._target, "left": self._left}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of ``state_dict()``."""
        self._factor, self._target, self._left = state_dict["factor"], state_dict["target"], state_dict["left"]
        self._confirmed = None


def rate_of(group: Any) -> Any:
    """Return the learning rate of an object with one, or its schedule."""
    if isinstance(group, Mapping):
        return group["lr"]
    found = group.learning_rate
    return float(found.numpy() if hasattr(found, "numpy") else found) if not callable(found) else found


def set_rate(group: Any, rate: Any) -> None:
    """Set the learning rate of an object with one.

    Raises:
        RequestError: ``rate`` is a schedule.
    """
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
    """Return the number of batches that each rank accumulates to reach a global batch size.

    Args:
        global_batch_size: minimum number of samples in a step, over all ranks.
        batch_size: samples of one rank in a backward pass.

    Raises:
        ValueError: an argument is less than 1.
    """
    if global_batch_size < 1 or batch_size < 1:
        raise ValueError(f"sizes of batches must be 1 or more. Received: {global_batch_size}, {batch_size}")
    return -(-global_batch_size // (batch_size * context.world().size))
