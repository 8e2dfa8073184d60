"""Memory that is slow to write because another core has read it: whether its readers should overwrite it.

Between cores that share no cache (of two sockets, or of two parts of a large processor), memory that the other
one has only read is slow to write: 427 us for a MiB, against 47 us where the other one has written to it since.
Under one shared cache it takes 26 us either way, and overwriting is 13 us wasted. Which it is can change at any
time, as the system moves processes about. So each rank times how long it takes to fill what it shows to others,
and lets them know when it wishes them to overwrite what they have read.
"""

from __future__ import annotations

from horovod.transports.kernels import Buffer, Kernels
from horovod.transports.shm.control import Control

__all__ = ["LEAST_BYTES", "Handover"]

#: Less is not worth the look at the clock.
LEAST_BYTES = 32 << 10
#: Nanoseconds that a slow fill takes per byte, at least; a quick one takes a tenth, from main memory a third.
_SLOW = 0.25
#: So many slow fills in a row are no accident, and not the first use of the staging buffers either.
_STREAK = 8
#: Fills until every place has been overwritten by its reader, after the wish became known.
_SETTLING = 64
#: Fills until a rank looks whether its wish is still needed, and until it wishes again when that was of no use.
_HELPFUL, _USELESS = 1024, 8192


class Handover:
    """What this rank wishes of those who read its memory, and what they wish of it.

    Args:
        control: the control page.
    """

    def __init__(self, control: Control) -> None:
        self._words = control.words64
        self._wishes = control.wish
        self._own = control.wish[control.rank]
        self._streak = 0
        self._fills = 0
        self._rest = 0

    def is_wished_by(self, rank: int) -> bool:
        """Whether ``rank`` wishes that others overwrite what they have read of it."""
        return bool(self._words[self._wishes[rank]])

    def hand_back(self, rank: int, place: Buffer, kernels: Kernels) -> None:
        """Overwrite what this rank, and nobody else, has read of ``rank``'s, if that one wishes it."""
        if self.is_wished_by(rank):
            kernels.clear(place)

    def note(self, nbytes: int, nanoseconds: int) -> None:
        """Take note of how long it took to fill memory that one other rank is going to read; little says nothing."""
        if nbytes < LEAST_BYTES:
            return
        self._streak = self._streak + 1 if nanoseconds > nbytes * _SLOW else 0
        if not self._words[self._own]:
            self._rest -= 1
            if self._streak >= _STREAK and self._rest < 0:
                self._wish(True)
            return
        self._fills += 1
        if self._fills > _SETTLING and self._streak >= _STREAK:
            self._rest = _USELESS
            self._wish(False)
        elif self._fills >= _HELPFUL:
            self._wish(False)

    def _wish(self, wish: bool) -> None:
        self._words[self._own] = wish
        self._streak = self._fills = 0
