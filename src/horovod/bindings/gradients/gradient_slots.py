"""One parameter and the place of its gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod.bindings.gradients.buckets import Bucket

__all__ = ["GradSlot"]


@dataclass(eq=False)
class GradSlot:
    """One parameter and the place of its gradient.

    Attributes:
        parameter: the parameter.
        name: name of the parameter.
        passes_left: backward passes until its gradient is complete.
        arrival: position at which its gradient became ready in the first step, for the order of buckets; -1 if unknown.
        bucket: bucket of its gradient; ``None`` before the ranks have agreed, or if it is reduced outside buckets.
        view: the gradient's part of the bucket's buffer.
        sparse_dim: number of sparse dimensions of its gradient; 0 for a dense one.
        unbucketed: whether its gradient is reduced outside buckets.
        pending: function that waits for the operation in flight, for a gradient outside buckets.
        mark: the gradient as it was when the ranks began to count on it, in the framework's words.
    """

    parameter: Any
    name: str
    passes_left: int
    arrival: int = -1
    bucket: Bucket | None = None
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
