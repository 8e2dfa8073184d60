"""One parameter and the place of its gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["GradSlot"]


@dataclass(eq=False)
class GradSlot:
    """One parameter and the place of its gradient."""

    parameter: Any
    name: str
    passes_left: int  # backward passes until its gradient is complete
    # position at which its gradient became ready in the first step, for the order of buckets; -1 if unknown
    arrival: int = -1
    # `Bucket` of its gradient; `None` before the ranks have agreed, or if it is reduced outside buckets
    bucket: Any = None
    home: Any = None  # the gradient's part of the bucket's buffer
    view: Any = None  # an alias of it, which the parameter has as its gradient
    sparse_dim: int = 0  # number of sparse dimensions of its gradient; 0 for a dense one
    unbucketed: bool = False  # whether its gradient is reduced outside buckets
    # function that waits for the operation in flight, for a gradient outside buckets
    pending: Any = field(default=None, repr=False)
    # the gradient as it was when the ranks began to count on it, in the framework's words
    mark: Any = field(default=None, repr=False)

    def reset(self, passes: int) -> None:
        """Forget everything but the parameter and its gradient."""
        self.passes_left, self.arrival = passes, -1
        self.bucket = self.home = self.view = self.pending = self.mark = None
        self.sparse_dim, self.unbucketed = 0, False
