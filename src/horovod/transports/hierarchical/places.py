"""Allreduce of a tensor where it lies: in the arenas of all ranks of a host, instead of in the buffers of the stage.

No input is copied into buffers; of the result, only the slices that other ranks have reduced are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod.transports.base import Entry
from horovod.transports.groups import Bytes
from horovod.transports.hierarchical.stage import Memory
from horovod.transports.kernels import Buffer

__all__ = ["InPlace", "in_place"]


class InPlace:
    """Shows the members' parts of the rounds on this host, as ``Stage`` does, but in their tensors in the arenas.

    Args:
        memories: where each member's tensor lies.
        starts: byte of the tensor at which each round begins.
    """

    are_tensors = True

    def __init__(self, memories: Sequence[Memory], starts: Sequence[int]) -> None:
        self._memories, self._starts = memories, starts

    def view(self, member: int, round_: int, low: int, kernels: str, dtype: str, count: int) -> Buffer:
        """Return an array in a member's tensor."""
        return self._memories[member].view(kernels, self._starts[round_] + low, dtype, count)

    def raw(self, member: int, round_: int, low: int, high: int) -> Bytes:
        """Return bytes of a member's tensor."""
        start = self._starts[round_]
        return self._memories[member].raw(start + low, start + high)


def in_place(entry: Entry, local: Sequence[int], arenas: Sequence[Any]) -> Sequence[Memory]:
    """Return where the tensor of an allreduce lies, by member on this host; empty unless all have it in the arena.

    Args:
        entry: the allreduce.
        local: the members on this host.
        arenas: their memory, as this process maps it; empty if they share none.
    """
    response = entry.response
    if not arenas or len(response.requests[0].tensors) != 1 or response.requests[0].device != "cpu":
        return ()
    places = {rank: response.request_of(i).placement for i, rank in enumerate(response.members)}
    if not all(places[rank] for rank in local):
        return ()
    nbytes = response.requests[0].tensors[0].nbytes
    return [Memory(arena, places[rank][0], nbytes) for arena, rank in zip(arenas, local, strict=True)]
