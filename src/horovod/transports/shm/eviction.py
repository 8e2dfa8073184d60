"""Memory that is slow to write because another core has read it: whether its readers should overwrite it.

Between cores that share no cache (of two sockets, or of two parts of a large processor), memory that the other
one has only read is slow to write: 427 us for a MiB, against 47 us where the other one has written to it since.
Under one shared cache it takes 26 us either way, and overwriting is 13 us wasted. Which it is can change at any
time, as the system moves processes about. So each rank times how long it takes to fill what it shows to others,
and lets them know when it wants them to overwrite what they have read.
"""

from __future__ import annotations

from horovod.transports.kernels import Buffer, Kernels
from horovod.transports.shm.control import Control

__all__ = ["LEAST_BYTES", "Eviction"]

#: Less is not worth the look at the clock.
LEAST_BYTES = 32 << 10
#: Nanoseconds that a slow fill takes per byte, at least; a quick one takes a tenth, from main memory a third.
_SLOW = 0.25
#: So many slow fills in a row are no accident, and not the first use of the staging buffers either.
_STREAK = 8
#: Fills until every place has been overwritten by its reader, after this became known.
_SETTLING = 64
#: Fills until a rank looks whether that is still needed, and until it tries again when it was of no use.
_HELPFUL, _USELESS = 1024, 8192


class Eviction:
    """Whether readers of a rank's memory are to evict it from their caches, by overwriting it.

    Args:
        control: the control page.
    """

    def __init__(self, control: Control) -> None:
        self._words = control.words64
        self._wanted = control.evict
        self._own = control.evict[control.rank]
        self._streak = 0
        self._fills = 0
        self._rest = 0

    def is_wanted_by(self, rank: int) -> bool:
        """Whether ``rank`` wants others to overwrite what they have read of it."""
        return bool(self._words[self._wanted[rank]])

    def evict(self, rank: int, place: Buffer, kernels: Kernels) -> None:
        """Overwrite what this rank, and nobody else, has read of ``rank``'s, if that one wants it."""
        if self.is_wanted_by(rank):
            kernels.clear(place)

    def note(self, nbytes: int, nanoseconds: int) -> None:
        """Take note of how long it took to fill memory that one other rank is going to read; little says nothing."""
        if nbytes < LEAST_BYTES:
            return
        self._streak = self._streak + 1 if nanoseconds > nbytes * _SLOW else 0
        if not self._words[self._own]:
            self._rest -= 1
            if self._streak >= _STREAK and self._rest < 0:
                self._want(True)
            return
        self._fills += 1
        if self._fills > _SETTLING and self._streak >= _STREAK:
            self._rest = _USELESS
            self._want(False)
        elif self._fills >= _HELPFUL:
            self._want(False)

    def _want(self, wanted: bool) -> None:
        self._words[self._own] = wanted
        self._streak = self._fills = 0
