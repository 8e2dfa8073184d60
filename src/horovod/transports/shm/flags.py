"""Wait for the flags of other ranks: look for a while, then sleep."""

from __future__ import annotations

import time
from collections.abc import Sequence

from horovod.errors import HorovodInternalError
from horovod.transports.base import Watch
from horovod.transports.shm import futex
from horovod.transports.shm.control import HOLDER, PHASE_BITS, Control
from horovod.transports.shm.spinner import Spinner

__all__ = ["DONE", "Flags"]

#: The last phase of every entry: this rank no longer reads or writes other ranks' memory for it.
DONE = (1 << PHASE_BITS) - 1
_SLICE_S = 0.1


class Flags:
    """Post and await progress."""

    def __init__(self, control: Control, watch: Watch) -> None:
        self.control = control
        self._watch = watch
        self._spinner = Spinner(control.crowded, control.polite)
        self._words = control.words64
        self._index = control.flag

    def post(self, value: int, members: Sequence[int]) -> None:
        """Advance this rank's flag."""
        self.control.post(value, members)

    def reached(self, members: Sequence[int], value: int) -> bool:
        """Whether all ``members`` have come to ``value``."""
        words, index = self._words, self._index
        for member in members:
            if words[index[member]] < value:
                return False
        if not futex.is_strongly_ordered:
            futex.fence()
        return True

    def wait(self, members: Sequence[int], value: int) -> None:
        """Block until all ``members`` have come to ``value``.

        Raises:
            PeerLostError: one of them died.
            StallError: one of them did not come within the timeout.
        """
        words, index = self._words, self._index
        for member in members:
            if words[index[member]] < value:
                self._wait_for(member, value)
        if not futex.is_strongly_ordered:
            futex.fence()

    def _wait_for(self, member: int, value: int) -> None:
        words, index = self._words, self._index[member]
        if self._spinner.look(lambda: words[index] >= value):
            return
        control, watch = self.control, self._watch
        control.ring_deferred()
        words32, mode, bell = control.words32, control.mode[control.rank], control.bell[control.rank]
        started = time.monotonic()
        try:
            while True:
                seen = words32[bell]
                control.announce(value)
                if words[index] >= value:
                    return
                has_rung = watch.is_alarmed or control.sleep(seen, _SLICE_S, HOLDER)
                if words[index] < value and (not has_rung or watch.is_alarmed):
                    try:
                        watch.check(member, time.monotonic() - started)
                    except HorovodInternalError:
                        if words[index] < value:
                            raise  # else it did its part, and then left or failed, since this rank looked
        finally:
            words32[mode] = 0
