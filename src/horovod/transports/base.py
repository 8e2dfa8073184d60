"""The interface between the engine and a transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from horovod.core.requests import Kind, ReduceOp, Request, Response
from horovod.transports.kernels import Buffer
from horovod.transports.threads import are_spread

__all__ = ["Entry", "Inline", "Transport", "Watch", "Work"]


class Entry:
    """A response of the log, with what a transport worked out for it once.

    Attributes:
        response: the response.
        name: its process set and its name; None if it has no name.
        me: this rank's index among ``response.members``, or -1.
        is_data: whether tensors are moved; else it is an error, or an answer.
        most_bytes: no result is larger than that.
        is_large: whether a library may spread a tensor of it over several threads.
        splits: rows that each member of an alltoall sends to each.
        cache: the transport's own, kept as long as the entry.
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
    """This rank's side of one execution: where its data lies.

    Attributes:
        kernels: name of the kernels that understand the buffers.
        inputs: one contiguous buffer per tensor, read only.
        outputs: one per tensor, written; the input itself for an operation in place; empty until the
            transport knows the shape and calls ``allocate``.
        slot: the transport's own, for data that was sent along with the request.
        lend: the transport's own; returns memory for a result of so many bytes, or None.
    """

    kernels: str
    inputs: Sequence[Buffer]
    outputs: Sequence[Buffer]
    slot: Any = None
    lend: Callable[[int], Any] | None = None

    def allocate(self, index: int, shape: tuple[int, ...]) -> Buffer:
        """Return the output buffer of tensor ``index``, made now if there is none."""
        raise NotImplementedError


class Inline(Protocol):
    """State that a transport keeps to send the data of one kind of request along with each request of that kind."""


class Transport(Protocol):
    """Moves and reduces the bytes of one log entry at a time.

    ``run`` may block: when an entry is in the log, all its members are ready and execute it next.

    Attributes:
        name: of the transport.
        is_awaited: whether a thread of this rank waits for a result, so that its cores are free for computing it.
        fresh: the ``placement`` in a request of one tensor whose result the transport allocates; empty if the transport
            does not care which side allocates it.
    """

    name: str
    is_awaited: bool
    fresh: tuple[int, ...]

    def takes(self, device: str, kind: Kind, op: ReduceOp, dtypes: Sequence[str]) -> bool:
        """Return whether ``run`` takes tensors of a device where they are; else they are brought to host memory.

        The same on all ranks. Results for these tensors are complete when ``run`` returns.
        """

    def allocate(self, nbytes: int) -> Any:
        """Return memory that this transport moves with the fewest copies, zeroed; it is freed with its last user.

        Raises:
            MemoryError: there is no more of it.
        """

    def place(self, addresses: Sequence[int]) -> tuple[int, ...]:
        """Return what the other members need in order to reach the memory of tensors in place; nothing if they cannot.

        Args:
            addresses: of the first byte of each tensor of a request.
        """

    def fuse_class(self, request: Request) -> str:
        """Return what all neighbours in the log that ``run`` may get as one batch have in common; nothing if none."""

    def inline(self, kernels: str, request: Request, members: int) -> Inline | None:
        """Return what ``offer`` needs for such requests; None if their data is never sent along with them.

        Args:
            kernels: name of the kernels that understand the buffers.
            request: as every submission of it.
            members: number of ranks of the process set.
        """

    def offer(self, work: Work, inline: Any) -> int:
        """Send the data along with the request, if there is room; return a note for the other members, or ``NO_NOTE``.

        Args:
            work: whose inputs these are.
            inline: of this transport, for this request.
        """

    def run(self, sequence: int, batch: Sequence[tuple[Entry, Work]], notes: tuple[int, ...]) -> int:
        """Execute one log entry.

        Args:
            sequence: its place in the log.
            batch: one entry and this rank's side of it, or several of one ``fuse_class``.
            notes: what ``offer`` returned on each member; empty unless all of them sent their data along.

        Returns:
            0 when the outputs are there; else this rank has done its part, and the outputs are there as soon as
            all members are ``settled`` at this value.

        Raises:
            PeerLostError: a member died meanwhile.
            StallError: a member did not go on within the timeout.
        """

    def settled(self, members: Sequence[int], fence: int) -> bool:
        """Whether all ``members`` have done their part of what ``run`` gave ``fence`` for."""

    def skip(self, work: Work) -> None:
        """Forget a work that ended without being executed."""

    def rest(self) -> None:
        """Give back memory that was not needed lately; called now and then by who runs the log."""

    def close(self) -> None:
        """Release what this process holds."""


class Watch(Protocol):
    """Says whether a rank still lives; a transport asks now and then while it waits for one in an operation."""

    @property
    def is_alarmed(self) -> bool:
        """Whether to ask at once."""

    def check(self, rank: int, waited_s: float) -> None:
        """Raise when there is no point in waiting for ``rank`` any longer.

        Raises:
            PeerLostError: the rank is gone.
            StallError: it did not go on within the timeout.
        """
