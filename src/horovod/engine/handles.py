"""The handle of a submission, which its caller holds until it is done."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from horovod.core.requests import ITEMSIZE, Request
from horovod.engine.times import ENDED, ERROR, Times, now
from horovod.transports.base import Work
from horovod.transports.kernels import Buffer

__all__ = ["Allocator", "CachedRequest", "Handle", "Transfer"]


class Allocator(Protocol):
    """The part of a framework's adapter that the engine needs."""

    kernels: str

    def address(self, buffer: Any) -> int:
        """Return the address of a buffer's first byte."""

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        """Return an uninitialised tensor on the device of ``like``."""


class Transfer(Protocol):
    """Moves the tensors of one operation from a device to the engine."""

    def before(self) -> None:
        """Block until the tensors are ready; called by the thread that executes the operation."""

    def after(self, outputs: Sequence[Buffer]) -> None:
        """Take the results; called by the thread that executed the operation."""


class CachedRequest:
    """A request that this rank has submitted before."""

    __slots__ = ("id", "in_flight", "inline", "name", "nbytes", "pin", "request", "uses")

    def __init__(self, request: Request, pin: object) -> None:
        self.id = -1  # its number in submissions; -1 until it is declared
        self.request = request
        # its process set and its name; None if it has no name
        self.name = (request.process_set, request.name) if request.name else None
        self.nbytes = sum(tensor.nbytes for tensor in request.tensors)  # bytes of all tensors
        # state for the transport to send the data along with the request; None if it does not do so
        self.inline: Any = None
        self.in_flight = 0  # submissions that are not done
        self.uses = 0  # all submissions
        self.pin = pin  # the object that the cache key refers to by id; kept alive here


class Handle(Work, kw_only=True, eq=False):
    """One submission."""

    allocator: Allocator  # the framework's adapter
    cached: CachedRequest  # the submitted request
    times: Times  # see `horovod.engine.times`
    transfer: Transfer | None = None  # for tensors of a device, else None
    accepted: bool = False  # whether the engine has taken it over from the thread that submitted it
    done: bool = False  # whether it has ended, with success or failure
    error: BaseException | None = None  # why it failed, or None
    result: int = 0  # the answer of an operation that answers with a number
    received_splits: tuple[int, ...] = ()  # rows that came from each member of an alltoall
    # Locks that are released when the handle is done; Any, because their type has no name. One for each thread that
    # sleeps: threads that come at once cannot agree on one.
    waiters: list[Any] = msgspec.field(default_factory=list)

    def allocate(self, index: int, shape: tuple[int, ...]) -> Buffer:
        outputs = self.outputs
        if index < len(outputs):
            return outputs[index]
        dtype = self.cached.request.tensors[index].dtype
        tensor = None if self.lend is None or self.transfer is not None else self._borrow(self.lend, shape, dtype)
        if tensor is None:
            tensor = self.allocator.empty(shape, dtype, self.inputs[index])
        self.outputs = [*outputs, tensor]
        return tensor

    def _borrow(self, lend: Callable[[int], Any], shape: tuple[int, ...], dtype: str) -> Buffer | None:
        # An adapter that makes its results elsewhere, for example in a graph, has no ``over``.
        over = getattr(self.allocator, "over", None)
        memory = lend(math.prod(shape) * ITEMSIZE[dtype]) if over is not None else None
        return over(memory, shape, dtype) if over is not None and memory is not None else None

    def deliver(self) -> Exception | None:
        """Copy the outputs to their device, now that no other rank writes to them; return the error, or None."""
        assert self.transfer is not None
        try:
            self.transfer.after(self.outputs)
        except Exception as error:  # all ranks have done their part, so none is out of step
            return error
        return None

    def finish(self, error: BaseException | None = None, wake: bool = True) -> None:
        """Mark the handle as ended, and wake the threads that sleep on it, unless the caller will do that soon."""
        if self.done:
            return
        self.error = error
        if error is not None:
            self.times[ENDED], self.times[ERROR] = now(), str(error)
        self.cached.in_flight -= 1
        self.inputs = ()
        self.done = True
        if wake:
            self.wake()

    def wake(self) -> None:
        """Wake all threads that sleep on it."""
        for waiter in list(self.waiters):
            try:
                waiter.release()
            except RuntimeError:
                pass  # another thread has released it; a check before ``release`` could not prevent this race
