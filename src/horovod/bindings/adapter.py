"""Interface of a framework; all other code of the bindings is written once, over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from horovod.transports.kernels import Buffer

__all__ = ["Adapter", "DeviceTensors", "StagedTensors", "TensorTransfer"]


class TensorTransfer(Protocol):
    """Passes the tensors of one operation on from a device, and the results back."""

    def before(self) -> None:
        """Block until the tensors are there; called by the thread that executes the operation."""

    def after(self, outputs: Sequence[Buffer]) -> None:
        """Take the results; called by the thread that executed it."""

    def collect(self) -> Sequence[Any]:
        """Return the results."""


class DeviceTensors(TensorTransfer, Protocol):
    """Hands the tensors of one operation over where they are."""

    @property
    def buffers(self) -> Sequence[Buffer]:
        """Contiguous aliases of the tensors, or copies on their device."""

    def begin(self) -> None:
        """Note that the caller has put all in its way that writes them."""


class StagedTensors(TensorTransfer, Protocol):
    """Brings the tensors of one operation to host memory, and the results back to the device."""

    @property
    def hosts(self) -> Sequence[Buffer]:
        """Host buffers, filled once ``before`` has returned."""


class Adapter(Protocol):
    """A framework, as the collectives see it; kept small.

    Attributes:
        name: of the framework.
        kernels: name of the kernels that understand its buffers.
        writable: whether tensors can be written in place; if not, collectives in place are refused.
    """

    name: str
    kernels: str
    writable: bool

    def buffer(self, tensor: Any) -> Buffer | None:
        """Return a contiguous alias of ``tensor`` without gradient history, to read; None if it is not contiguous
        or not in host memory.

        Raises:
            TypeError: it is no tensor of this framework.
            ValueError: it is one that cannot be sent, such as a sparse one.
        """

    def target(self, tensor: Any) -> Buffer | None:
        """Return ``buffer(tensor)`` for an operation in place, which writes it; never called if not ``writable``.

        Raises:
            TypeError: as ``buffer``.
            ValueError: as ``buffer``, or this tensor cannot be written.
        """

    def wrap(self, buffer: Buffer) -> Any:
        """Return the framework's tensor over a result buffer that ``empty`` or ``over`` made; zero copy if possible."""

    def address(self, buffer: Buffer) -> int:
        """Return the address of a buffer's first byte."""

    def device(self, tensor: Any) -> str:
        """Return ``cpu``, or the framework's name of the device."""

    def stage(self, tensors: Sequence[Any], targets: Sequence[Any] | None) -> StagedTensors:
        """Begin to bring tensors of a device to the host."""

    def passed(self, tensors: Sequence[Any]) -> DeviceTensors:
        """Begin to hand tensors of a device over where they are."""

    def contiguous(self, tensor: Any) -> Buffer:
        """Return a contiguous copy, on the same device."""

    def write_back(self, tensor: Any, buffer: Buffer) -> None:
        """Copy ``buffer`` over ``tensor``, which need not be contiguous."""

    def empty(self, shape: tuple[int, ...], dtype: str, like: Buffer) -> Buffer:
        """Return an uninitialised buffer for a result, on the device of ``like``; aligned as ``wrap`` needs it."""

    def over(self, memory: Any, shape: tuple[int, ...], dtype: str) -> Buffer:
        """Return a buffer over memory of the arena, which it keeps alive."""

    def dtype_name(self, dtype: Any) -> str:
        """Return the canonical name of a dtype of the framework; None is its default."""

    def splits(self, splits: Any) -> tuple[int, ...]:
        """Return the splits of an alltoall as numbers.

        Raises:
            ValueError: they are no integers.
        """

    def received_splits(self, splits: tuple[int, ...], like: Any) -> Any:
        """Return received splits in the framework's own type."""
