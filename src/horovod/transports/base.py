"""The interface between the engine and a transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from horovod.core.requests import Kind, ReduceOp, Request, Response
from horovod.splits import part_of
from horovod.transports.kernels import Buffer
from horovod.transports.libraries import are_spread

__all__ = ["Entry", "Transport", "Watch", "Work", "rows_taken", "sum_class"]


class Entry:
    """A response of the log, with data that a transport derives from it once.

    Attributes:
        response: the response.
        name: its process set and its name; None if it has no name.
        me: this rank's index among ``response.members``, or -1.
        is_data: whether tensors are moved; else it is an error, or an answer.
        most_bytes: upper bound of the bytes of a result.
        is_large: whether a library may spread a tensor of it over several threads.
        splits: rows that each member of an alltoall sends to each member.
        cache: data of the transport, kept as long as the entry.
    """

    __slots__ = ("cache", "is_data", "is_large", "me", "most_bytes", "name", "response", "splits")

    def __init__(self, response: Response, rank: int) -> None:
        self.response = response
        self.name = (response.process_set, response.name) if response.name else None
        self.me = response.members.index(rank) if rank in response.members else -1
        self.is_data = not response.error and response.kind < Kind.JOIN
        each = [spec.nbytes for request in response.requests for spec in request.tensors]
        self.most_bytes = sum(each) * (len(response.members) if len(response.requests) == 1 else 1)
        self.is_large = any(are_spread(request.tensors) for request in response.requests)
        self.splits = response.splits() if response.kind is Kind.ALLTOALL and response.requests else []
        self.cache: Any = None


class Work(msgspec.Struct, eq=False):
    """This rank's side of one execution: where its data lies."""

    kernels: str  # name of the kernels that understand the buffers
    inputs: Sequence[Buffer]  # one contiguous buffer per tensor, read only
    # one per tensor, written; the input itself for an operation in place; empty until the transport knows the shape and
    # calls `allocate`
    outputs: Sequence[Buffer]
    slot: Any = None  # the transport's own, for data that was sent along with the request
    # the transport's own; returns memory for a result of so many bytes, or None
    lend: Callable[[int], Any] | None = None

    def allocate(self, index: int, shape: tuple[int, ...]) -> Buffer:
        """Return the output buffer of tensor ``index``, made now if there is none."""
        raise NotImplementedError


def rows_taken(entry: Entry) -> list[list[slice]]:
    """Return the rows that this rank takes of each tensor of each member; empty if each rank takes all."""
    response, me = entry.response, entry.me
    if response.kind is Kind.ALLTOALL:
        starts = [sum(row[:me]) for row in entry.splits]
        return [[slice(at, at + row[me]) for at, row in zip(starts, entry.splits, strict=True)]]
    if response.kind is Kind.REDUCESCATTER:
        size = len(response.members)
        return [[slice(*part_of(spec.shape[0], size, me))] * size for spec in response.requests[0].tensors]
    return []


def sum_class(request: Request) -> str:
    """Return a class of allreduces that differ only in their tensors, for ``fuse_class``; empty if it has none."""
    dtypes = {spec.dtype for spec in request.tensors}
    if request.kind is not Kind.ALLREDUCE or request.op is ReduceOp.ADASUM or len(dtypes) != 1:
        return ""
    return f"{dtypes.pop()} {request.op:d} {request.prescale!r} {request.postscale!r}"


class Transport(Protocol):
    """Moves and reduces the bytes of one log entry at a time.

    ``run`` may block: when an entry is in the log, all its members are ready and execute it next.
    """

    name: str
    is_awaited: bool  # whether a thread of this rank waits for a result, so that its cores are free for computing it
    # the `placement` in a request of one tensor whose result the transport allocates; empty if the transport does not
    # care which side allocates it
    fresh: tuple[int, ...]

    def takes(self, device: str, kind: Kind, op: ReduceOp, dtypes: Sequence[str]) -> bool:
        """Return whether ``run`` takes tensors of a device where they are; else they are copied to host memory.

        All ranks get the same answer. Results for these tensors are complete when ``run`` returns.
        """

    def allocate(self, nbytes: int) -> Any:
        """Return memory that this transport moves with the fewest copies, zeroed; it is freed with its last user.

        Raises:
            MemoryError: there is no more memory of this kind.
        """

    def place(self, addresses: Sequence[int]) -> tuple[int, ...]:
        """Return the data with which other members reach the memory of tensors, given by the addresses of their first
        bytes; empty if they cannot reach it.
        """

    def fuse_class(self, request: Request) -> str:
        """Return a class: ``run`` may get neighbours in the log of one class as one batch; empty if it may not."""

    def inline(self, kernels: str, request: Request, members: int) -> Any:
        """Return the state that ``offer`` needs for a request, the same for every submission; None if its data is never
        sent along with it. ``members`` is the number of ranks of its process set.
        """

    def offer(self, work: Work, inline: Any) -> int:
        """Send the data along with the request, if there is room; return a note for the other members, or ``NO_NOTE``.
        ``inline`` is the result of that method for this request.
        """

    def run(self, sequence: int, batch: Sequence[tuple[Entry, Work]], notes: tuple[int, ...]) -> int:
        """Execute one log entry.

        Args:
            sequence: its place in the log.
            batch: one entry and this rank's side of it, or several of one ``fuse_class``.
            notes: the result of ``offer`` on each member; empty unless all members sent their data along.

        Returns:
            0 if the outputs are complete; else a fence: this rank has done its part, and the outputs are complete
            as soon as all members are ``settled`` at this value.

        Raises:
            PeerLostError: a member died meanwhile.
            StallError: a member did not go on within the timeout.
        """

    def settled(self, members: Sequence[int], fence: int) -> bool:
        """Whether all ``members`` have done their part of the batch for which ``run`` returned ``fence``."""

    def skip(self, work: Work) -> None:
        """Forget a work that ended without being executed."""

    def rest(self) -> None:
        """Release memory that was not needed lately; called now and then by the thread that runs the log."""

    def close(self) -> None:
        """Release the resources of this process."""


class Watch(Protocol):
    """Reports whether a rank still lives; a transport asks now and then while it waits for one in an operation."""

    @property
    def is_alarmed(self) -> bool:
        """Whether transports should call ``check`` at once."""

    def check(self, rank: int, waited_s: float) -> None:
        """Raise when there is no point in waiting for ``rank`` any longer.

        Raises:
            PeerLostError: the rank is gone.
            StallError: the rank did not go on within the timeout.
        """
