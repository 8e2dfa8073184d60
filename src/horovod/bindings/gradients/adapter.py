"""Interface of a framework whose gradients are reduced while backward runs, and the place of one gradient."""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from horovod.bindings.collectives import Collectives
from horovod.bindings.gradients.settings import ReduceSettings

__all__ = ["GradSlot", "GradientAdapter", "Hook"]


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


class Hook(Protocol):
    """A function that was hooked in."""

    def remove(self) -> None:
        """Take it out again."""


class GradientAdapter(Protocol):
    """A framework with gradients that can be written. A *buffer* is flat, and a slice of it shares its memory."""

    comm: Collectives  # the framework's collectives
    owners: MutableMapping[Any, Any]  # who reduces the gradient of a parameter now, for as long as the parameter lives

    # -- parameters ----------------------------------------------------------------------------------------------

    def describe(self, parameter: Any) -> str:
        """Return dtype, shape and layout in words; parameters are the same on two ranks if these are."""

    def fingerprint(self, parameter: Any) -> int:
        """Return a number for the first values, the same wherever these have the same bits; fits 64 bits."""

    def count(self, parameter: Any) -> int:
        """Return the number of elements."""

    def dtype(self, parameter: Any) -> str:
        """Return the name of the dtype, such as ``float32``."""

    def itemsize(self, parameter: Any) -> int:
        """Return the bytes of an element."""

    def kind(self, parameter: Any) -> Hashable:
        """Return what may share a buffer: dtype and device."""

    # -- gradients -----------------------------------------------------------------------------------------------

    def hook(self, parameter: Any, function: Callable[[Any], None]) -> Hook:
        """Have ``function(parameter)`` called whenever its gradient was accumulated."""

    def quietly(self) -> AbstractContextManager[Any]:
        """Return a context in which nothing is recorded for backward."""

    def gradient(self, parameter: Any) -> Any:
        """Return the gradient, or None."""

    def sparse_dim(self, parameter: Any) -> int:
        """Return the number of sparse dimensions of its gradient, which is there; 0 for a dense one."""

    def mark(self, parameter: Any) -> Any:
        """Return what tells later whether the gradient was changed or replaced meanwhile; None if there is none."""

    def has_changed(self, parameter: Any, mark: Any) -> bool:
        """Whether the gradient is another one than when it was marked. To take it away is not a change."""

    def lies_in_bucket(self, slot: GradSlot) -> bool:
        """Whether there is a gradient, and it lies in ``slot.home``."""

    def adopt(self, slot: GradSlot) -> bool:
        """Make the gradient, if there is one, lie in ``slot.home``, and note its sparse dimensions; return whether
        there is one.
        """

    def give(self, slot: GradSlot) -> None:
        """Make ``slot.home`` the gradient; where gradients are objects of their own, ``slot.view`` keeps it."""

    def make_sparse(self, slot: GradSlot) -> None:
        """Make a sparse copy of ``slot.home`` the gradient."""

    def start_unbucketed(self, slot: GradSlot, settings: ReduceSettings, name: str) -> Callable[[], None]:
        """Start the reduction of a gradient in no bucket; the returned function waits and puts the result in place."""

    # -- buffers -------------------------------------------------------------------------------------------------

    def zeros(self, count: int, like: Any, dtype: str | None = None) -> Any:
        """Return a buffer of zeros on the device of a parameter, of its dtype unless named, in the arena where it can
        be.
        """

    def view(self, buffer: Any, offset: int, parameter: Any) -> Any:
        """Return the part of a buffer that begins at ``offset``, in the shape and layout of a parameter."""

    def copy(self, into: Any, source: Any) -> None:
        """Copy a buffer over another one, which may be of another dtype."""

    def fill(self, buffer: Any, value: float) -> None:
        """Fill a buffer, or a view of one."""

    def write(self, buffer: Any, values: list[float]) -> None:
        """Write numbers to a buffer."""

    def read(self, buffer: Any) -> list[float]:
        """Return a buffer as numbers."""

    def version(self, buffer: Any) -> int:
        """Return a number that changes whenever somebody writes to the buffer or a view of it."""

    def unwatched(self, buffer: Any) -> Any:
        """Return an alias; what is written through it does not change ``version``."""
