"""One parameter and where its gradient goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["GradSlot", "SlotBucket"]


class SlotBucket(Protocol):
    """A bucket, as its slots see it.

    Attributes:
        incomplete: how many of its gradients are not ready.
    """

    incomplete: int

    @property
    def in_flight(self) -> bool:
        """Whether it has been handed over, and not come back."""

    @property
    def pending(self) -> Any:
        """Waits for what is in flight."""

    def submit(self) -> None:
        """Hand it over to the other ranks."""


@dataclass(eq=False)
class GradSlot:
    """One parameter and where its gradient goes.

    Attributes:
        parameter: the parameter.
        name: its name.
        passes_left: backward passes until its gradient is complete.
        arrival: when its gradient became ready in the first step, for the order of buckets.
        bucket: where it travels, or ``None`` before the ranks have agreed, and when it travels in none.
        view: its part of the bucket's buffer.
        sparse_dim: number of sparse dimensions of its gradient; 0 for a dense one.
        unbucketed: it travels in no bucket.
        pending: waits for what is in flight, for a gradient that travels in no bucket.
        mark: the gradient as it was when the ranks began to count on it, in the framework's words.
    """

    parameter: Any
    name: str
    passes_left: int
    arrival: int = -1
    bucket: SlotBucket | None = None
    view: Any = None
    sparse_dim: int = 0
    unbucketed: bool = False
    pending: Any = field(default=None, repr=False)
    mark: Any = field(default=None, repr=False)

    def reset(self, passes: int) -> None:
        """Forget everything but the parameter and its gradient."""
        self.passes_left, self.arrival = passes, -1
        self.bucket = self.view = self.pending = self.mark = None
        self.sparse_dim, self.unbucketed = 0, False
