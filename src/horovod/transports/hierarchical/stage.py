"""Buffers that the members of an entry on one host share, and the progress of each member.

An entry passes through the buffers in rounds: ``BUFFERS`` rounds in a row have different buffers. A rank that uses a
buffer for round k has seen every other rank begin round k - 1 or later, and no rank lags behind more than
``BUFFERS - 2``.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod.transports.base import Entry
from horovod.transports.groups import Bytes
from horovod.transports.kernels import Buffer
from horovod.transports.libraries import kernels_named
from horovod.transports.shm.control import PHASE_BITS
from horovod.transports.shm.flags import DONE, Flags

__all__ = ["BUFFERS", "CHUNK_BYTES", "STAGE_BYTES", "InPlace", "Memory", "Stage", "in_place"]

BUFFERS = 6
CHUNK_BYTES = 4 << 20
"""Bytes of one round: each round costs switches between processes, and to threads of the engine between hosts."""
STAGE_BYTES = BUFFERS * CHUNK_BYTES
_MOST_VIEWS = 2048


class Memory:
    """A stretch of memory, seen as bytes and as arrays; without a mapping, it is private."""

    def __init__(self, memory: Any, start: int, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if memory is None else memory
        self._start = start
        self._bytes: Bytes = np.frombuffer(self._memory, np.uint8, nbytes, start)
        self._views: dict[tuple[str, int, str, int], Buffer] = {}

    def raw(self, low: int, high: int) -> Bytes:
        """Return bytes ``low`` to ``high``."""
        return self._bytes[low:high]

    def view(self, kernels: str, low: int, dtype: str, count: int) -> Buffer:
        """Return an array of ``count`` elements at byte ``low``."""
        key = (kernels, low, dtype, count)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            found = kernels_named(kernels).view(self._memory, self._start + low, dtype, (count,))
            self._views[key] = found
        return found


class Stage:
    """See the module.

    Args:
        memories: ``STAGE_BYTES`` of each member.
        me: this rank's place among them.
        indices: the members' indices in ``flags``.
        flags: the progress of this host's ranks; None for a rank that is alone on its host.

    Attributes:
        are_tensors: whether the members show their tensors themselves; see ``InPlace``.
    """

    are_tensors = False

    def __init__(self, memories: Sequence[Memory], me: int, indices: Sequence[int], flags: Flags | None) -> None:
        self.memories = memories
        self.me = me
        self._indices = tuple(indices)
        self._flags = flags
        self._base = 0
        self._phase = 0

    def begin(self, sequence: int, last: tuple[Sequence[int], int]) -> tuple[Sequence[int], int]:
        """Begin a log entry. ``last`` is the result for the previous one: the last users of the buffers, and the flag
        of their end.
        """
        if self._flags is None:
            return last
        self._base, self._phase = sequence << PHASE_BITS, 0
        self._flags.wait(*last)
        return self._indices, self._base | DONE

    def end(self) -> None:
        """Report that this rank has finished the entry."""
        if self._flags is not None:
            self._flags.post(self._base | DONE, self._indices)

    def part(self) -> int:
        """Begin a part of the entry that uses the buffers anew; return the phase from which its phases count."""
        if self._phase:
            self.post(self._phase + 1)
            self.wait(self._phase)
        return self._phase

    def post(self, phase: int) -> None:
        """Report that this rank has reached ``phase``."""
        self._phase = phase
        if self._flags is not None:
            self._flags.post(self._base + phase, self._indices)

    def wait(self, phase: int) -> None:
        """Block until all members have reached ``phase``."""
        if self._flags is not None:
            self._flags.wait(self._indices, self._base + phase)

    def view(self, member: int, round_: int, low: int, kernels: str, dtype: str, count: int) -> Buffer:
        """Return an array in a member's buffer of a round."""
        return self.memories[member].view(kernels, round_ % BUFFERS * CHUNK_BYTES + low, dtype, count)

    def raw(self, member: int, round_: int, low: int, high: int) -> Bytes:
        """Return bytes of a member's buffer of a round."""
        start = round_ % BUFFERS * CHUNK_BYTES
        return self.memories[member].raw(start + low, start + high)


class InPlace:
    """Shows the members' parts of the rounds on this host, as ``Stage`` does, but in their tensors in the arenas.

    No input is copied into buffers; of the result, only the slices that other ranks have reduced are copied.
    ``starts`` are the bytes of the tensor at which the rounds begin.
    """

    are_tensors = True

    def __init__(self, memories: Sequence[Memory], starts: Sequence[int]) -> None:
        self._memories, self._starts = memories, starts

    def view(self, member: int, round_: int, low: int, kernels: str, dtype: str, count: int) -> Buffer:
        """Return an array in a member's tensor."""
        return self._memories[member].view(kernels, self._starts[round_] + low, dtype, count)


def in_place(entry: Entry, local: Sequence[int], arenas: Sequence[Any]) -> Sequence[Memory]:
    """Return where the tensor of an allreduce lies, by member on this host; empty unless all have it in the arena.
    ``arenas`` is empty if they share none.
    """
    response = entry.response
    if not arenas or len(response.requests[0].tensors) != 1 or response.requests[0].device != "cpu":
        return ()
    places = {rank: response.request_of(i).placement for i, rank in enumerate(response.members)}
    if not all(places[rank] for rank in local):
        return ()
    nbytes = response.requests[0].tensors[0].nbytes
    return [Memory(arena, places[rank][0], nbytes) for arena, rank in zip(arenas, local, strict=True)]
