"""Interface that each framework implements; the other code of the bindings is written once, on top of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from horovod.engine.handles import Transfer
from horovod.transports.kernels import Buffer

__all__ = ["Adapter", "DeviceTensors", "TensorTransfer"]


class TensorTransfer(Transfer, Protocol):
    """Moves the tensors of one operation from a device to the engine, and the results back."""

    @property
    def buffers(self) -> Sequence[Buffer]:
        """Contiguous aliases or copies of the tensors; in host memory they are filled once ``before`` has returned."""

    def collect(self) -> Sequence[Any]:
        """Return the results."""


class DeviceTensors(TensorTransfer, Protocol):
    """Passes the tensors of one operation on without leaving their device."""

    def begin(self) -> None:
        """Note that the caller has queued all work that writes the tensors."""


class Adapter(Protocol):
    """Functions that the collectives need from a framework; kept small."""

    name: str
    kernels: str  # name of the kernels that process its buffers
    writable: bool  # whether tensors can be written in place; if False, in-place collectives are refused

    def buffer(self, tensor: Any) -> Buffer | None:
        """Return a contiguous alias of ``tensor`` for reading, without gradient history; None if it is not contiguous
        or not in host memory.

        Raises:
            TypeError: ``tensor`` is not a tensor of this framework.
            ValueError: this kind of tensor cannot be sent, such as a sparse one.
        """

    def target(self, tensor: Any) -> Buffer | None:
        """Return ``buffer(tensor)``, or None as it does, for an in-place operation to write; never called if not
        ``writable``.

        Raises:
            TypeError: as for ``buffer``.
            ValueError: as for ``buffer``, or this tensor cannot be written.
        """

    def wrap(self, buffer: Buffer) -> Any:
        """Return the framework's tensor over a result buffer that ``empty`` or ``over`` made; zero copy if possible."""

    def address(self, buffer: Buffer) -> int:
        """Return the address of a buffer's first byte."""

    def device(self, tensor: Any) -> str:
        """Return ``cpu``, or the framework's name of the device."""

    def stage(self, tensors: Sequence[Any], targets: Sequence[Any] | None) -> TensorTransfer:
        """Start to copy tensors from a device to the host."""

    def passed(self, tensors: Sequence[Any]) -> DeviceTensors:
        """Start to pass device tensors on without leaving their device."""

    def contiguous(self, tensor: Any) -> Buffer:
        """Return a contiguous copy, on the same device."""

    def write_back(self, tensor: Any, buffer: Buffer) -> None:
        """Copy ``buffer`` over ``tensor``, which need not be contiguous."""

    def empty(self, shape: tuple[int, ...], dtype: str, like: Buffer) -> Buffer:
        """Return an uninitialised result buffer on the device of ``like``, with the alignment that ``wrap`` needs."""

    def over(self, memory: Any, shape: tuple[int, ...], dtype: str) -> Buffer:
        """Return a buffer over memory of the arena; the buffer keeps the memory alive."""

    def dtype_name(self, dtype: Any) -> str:
        """Return the canonical name of a framework dtype; None means the framework's default dtype."""

    def splits(self, splits: Any) -> tuple[int, ...]:
        """Return the splits of an alltoall as integers.

        Raises:
            ValueError: the splits are not integers.
        """

    def received_splits(self, splits: tuple[int, ...], like: Any) -> Any:
        """Return received splits in the framework's own type."""
