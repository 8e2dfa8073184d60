"""Chunked passage of ordinary tensors through the staging buffers, without a barrier per chunk.

Four buffers per rank. In round c a rank fills the buffer of round c+1, announces it, waits until all have filled
round c, and reads round c. Filling round c+1 overwrites round c-3: a peer announces "c-1 is filled" only after it
has read c-3, and this rank waited for that in its own round c-1. So no reader is ever overtaken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns

from horovod.transports.results import ResultPool
from horovod.transports.shm.arena import INLINE_BYTES, STAGING_BYTES, Arena
from horovod.transports.shm.clearing import Clearing
from horovod.transports.shm.control import PHASE_BITS
from horovod.transports.shm.flags import DONE, Flags
from horovod.transports.shm.reuse import Budget

__all__ = ["CHUNK_BYTES", "Staging"]

_BUFFERS = 4
CHUNK_BYTES = STAGING_BYTES // _BUFFERS

Step = Callable[[int, int], None]


class Staging:
    """The staging buffers of all ranks, at one offset in each arena, and tools that collectives need to use them."""

    def __init__(self, flags: Flags, arenas: Sequence[Arena], results: ResultPool) -> None:
        self.flags = flags
        self.results = results  # lends memory to results
        self.arenas = arenas
        self.rank = flags.control.rank
        self.arena = arenas[self.rank]  # this rank's arena
        self.budget = Budget()  # the limit of kept views of recurring operations
        self.clearing = Clearing(flags.control)
        self._last: tuple[Sequence[int], int] = ((), 0)

    def rounds(
        self, sequence: int, members: Sequence[int], count: int, fill: Step, drain: Step, phase: int = 0,
        filled: int = CHUNK_BYTES,
    ) -> int:  # fmt: skip
        """Run ``count`` rounds.

        Args:
            sequence: number of the log entry.
            members: the ranks that take part.
            count: number of rounds.
            fill: ``fill(round, offset)`` writes this rank's part to its own buffer at ``offset``.
            drain: ``drain(round, offset)`` reads all members' parts at ``offset``.
            phase: how many phases of the entry are over; more than 0 when rounds follow rounds.
            filled: bytes that ``fill`` writes in a full round.

        Returns:
            How many phases of the entry are over after these rounds.
        """
        if not count:
            # The tensors are empty everywhere: this rank must not wait for itself.
            return phase
        flags, base = self.flags, self._begin(sequence, members, phase)
        self._fill(fill, 0, filled)
        flags.post(base + 1, members)
        for c in range(count):
            if c + 1 < count:
                self._fill(fill, c + 1, filled)
                flags.post(base + c + 2, members)
            flags.wait(members, base + c + 1)
            drain(c, self.offset(c))
        return base + count - (sequence << PHASE_BITS)

    def _fill(self, fill: Step, round_: int, nbytes: int) -> None:
        began = monotonic_ns()
        fill(round_, self.offset(round_))
        self.clearing.note(nbytes, monotonic_ns() - began)

    def _begin(self, sequence: int, members: Sequence[int], phase: int) -> int:
        """Wait until the buffers may be filled; return the flag from which rounds count."""
        base = (sequence << PHASE_BITS) + phase
        if not phase:
            self.reserve(sequence, members)
            return base
        # All members must have read the data of the earlier phases in the buffers.
        self.flags.post(base + 1, members)
        self.flags.wait(members, base + 1)
        return base + 1

    @property
    def exchange_bytes(self) -> int:
        """Bytes that pass in a round of ``exchange``; the same for all ranks."""
        return STAGING_BYTES if self.flags.control.has_large_rounds else CHUNK_BYTES

    def exchange(
        self, sequence: int, members: Sequence[int], count: int, fill: Step, reduce: Step, collect: Step, phase: int = 0
    ) -> None:
        """Run ``count`` rounds of two steps each: after ``reduce``, all results can be read in ``collect``.

        Three buffers suffice: a rank has collected round c-2 when it announces that c-1 is reduced. Ranks that share
        cores use one large buffer: they gain nothing from filling ahead, but something from meeting less often.
        """
        flags, base = self.flags, self._begin(sequence, members, phase)
        if self.flags.control.has_large_rounds:
            self._exchange_in_turn(base, members, count, fill, reduce, collect)
            return
        if count:
            fill(0, self.offset(0))
            flags.post(base + 1, members)
        for c in range(count):
            if c + 1 < count:
                fill(c + 1, self.offset(c + 1))
                flags.post(base + 2 * c + 2, members)
            flags.wait(members, base + max(1, 2 * c))
            reduce(c, self.offset(c))
            flags.post(base + 2 * c + 3, members)
            flags.wait(members, base + 2 * c + 3)
            collect(c, self.offset(c))

    def _exchange_in_turn(
        self, base: int, members: Sequence[int], count: int, fill: Step, reduce: Step, collect: Step
    ) -> None:
        flags = self.flags
        for c in range(count):
            if c:
                flags.wait(members, base + 3 * c)
            for step, run in enumerate((fill, reduce, collect), 3 * c + 1):
                run(c, INLINE_BYTES)
                flags.post(base + step, members)
                if run is not collect:
                    flags.wait(members, base + step)

    def reserve(self, sequence: int, members: Sequence[int]) -> None:
        """Wait until the last readers of the buffers have finished."""
        readers, value = self._last
        self.flags.wait(readers, value)
        self._last = (members, sequence << PHASE_BITS | DONE)

    @staticmethod
    def offset(round_: int) -> int:
        """Return the byte offset, in every arena, of the buffer for a round."""
        return INLINE_BYTES + (round_ % _BUFFERS) * CHUNK_BYTES
