"""Overwriting data that was read, where the cores of two ranks share no cache.

There, memory that the other core has only read is slow to write: 0.4 ns per byte instead of 0.03. Memory that it has
written to after reading is not (decision 0011). Where a virtual machine runs can change at any time, so each rank times
how fast it fills the memory that it shows to others, and tells its readers.
"""

from __future__ import annotations

from horovod.transports.kernels import Buffer, Kernels
from horovod.transports.shm.control import Control

__all__ = ["LEAST_BYTES", "Clearing"]

#: Less data is not worth a look at the clock.
LEAST_BYTES = 32 << 10
#: Nanoseconds per byte of a slow fill. Copies from main memory into a shared cache take up to 0.15. Of the data of an
#: alltoall or a reducescatter of two ranks, only one half is slow.
_SLOW_NS = 0.18
#: Consecutive slow fills after which readers overwrite; the first use of a place is slow, too.
_STREAK = 8
#: Fills after which the rank checks again whether it needs that.
_PERIOD = 1024


class Clearing:
    """Whether readers overwrite the data of each rank that they alone have read."""

    def __init__(self, control: Control) -> None:
        self._words, self._wanted = control.words64, control.clears
        self._own = control.clears[control.rank]
        self._slow = self._left = 0

    def note(self, nbytes: int, nanoseconds: int) -> None:
        """Note how long it took to fill ``nbytes`` that one other rank will read."""
        self._slow = self._slow + 1 if nanoseconds > nbytes * _SLOW_NS else 0
        if self._left:
            self._left -= 1
            if not self._left:
                self._words[self._own] = self._slow = 0
        elif self._slow >= _STREAK:
            self._words[self._own] = 1
            self._left = _PERIOD

    def helps(self, rank: int) -> bool:
        """Return whether ``rank`` fills its memory faster if its readers overwrite it."""
        return bool(self._words[self._wanted[rank]])

    def clear(self, rank: int, place: Buffer, kernels: Kernels) -> None:
        """Overwrite the data of ``rank`` that this rank, and no other, has read, if that helps ``rank``."""
        if self.helps(rank):
            kernels.clear(place)
