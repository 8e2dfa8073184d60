"""What the engine hands to a transport, and what it expects of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from horovod.core.requests import Response
from horovod.transports.kernels import Buffer

__all__ = ["Entry", "Transport", "Work"]


class Entry:
    """A response of the log, with what a transport worked out for it once.

    Attributes:
        response: the response.
        me: this rank's index among ``response.members``, or -1.
        inline_plan: the transport's own, for data that rode along.
        arena_plan: the transport's own, for data that lives in the arena; an empty one if it does not.
        staged_plan: the transport's own, for ordinary data.
    """

    __slots__ = ("arena_plan", "inline_plan", "me", "response", "staged_plan")

    def __init__(self, response: Response, rank: int) -> None:
        self.response = response
        self.me = response.members.index(rank) if rank in response.members else -1
        self.inline_plan: Any = None
        self.arena_plan: list[Any] | None = None
        self.staged_plan: dict[int, list[Any]] = {}


class Work:
    """This rank's side of one execution: where its data lies.

    Attributes:
        kernels: name of the kernels that understand the buffers.
        inputs: one contiguous buffer per tensor, read only.
        outputs: one per tensor, written; the input itself for an operation in place; empty until the
            transport knows the shape and calls ``allocate``.
        readers: ranks that may still read what rode along in the request, until their flag reaches ``fence``.
        fence: flag value that frees it; 0 while the work was not executed.
    """

    __slots__ = ("fence", "inputs", "kernels", "outputs", "readers")

    def __init__(self, kernels: str, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        self.kernels = kernels
        self.inputs = inputs
        self.outputs = outputs
        self.readers: tuple[int, ...] = ()
        self.fence = 0

    def allocate(self, index: int, shape: tuple[int, ...]) -> Buffer:
        """Return the output buffer of tensor ``index``, made now if there is none."""
        raise NotImplementedError


class Transport(Protocol):
    """Moves and reduces the bytes of one log entry at a time.

    ``run`` may block: when an entry is in the log, all its members are ready and execute it next.
    """

    name: str

    def offer(self, work: Work, nbytes: int, slots: dict[int, list[Buffer]]) -> int:
        """Return a token for data that rides along in the request, or ``NO_TOKEN``.

        Args:
            work: whose inputs these are.
            nbytes: of all inputs.
            slots: the transport's own memory between offers of the same shapes and dtypes.
        """

    def run(self, sequence: int, batch: Sequence[tuple[Entry, Work]], tokens: tuple[int, ...]) -> int:
        """Execute one log entry; several works in ``batch`` are allreduces to be fused.

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

    def close(self) -> None:
        """Release what this process holds."""


#: Called now and then while waiting for a rank; raises when waiting is pointless. Takes the rank and the
#: seconds waited so far.
Watch = Callable[[int, float], None]
