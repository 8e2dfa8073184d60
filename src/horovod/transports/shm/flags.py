"""Wait for the flags of other ranks, or for another event: look for a while, then sleep."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from horovod.errors import HorovodInternalError
from horovod.transports.base import Watch
from horovod.transports.shm import futex
from horovod.transports.shm.control import HOLDER, PHASE_BITS, Control

__all__ = ["DONE", "Flags", "Spinner"]

#: The last phase of every entry: this rank no longer reads or writes other ranks' memory for it.
DONE = (1 << PHASE_BITS) - 1
_SLICE_S = 0.1


_TURNS = 300
#: After this many waits with useless eager looks, only every _RETRY-th wait tries them.
_TRIES, _RETRY = 4, 16
#: Waking a sleeper takes up to a quarter of a millisecond on virtual machines, and some microseconds elsewhere.
_POLITE_S = 0.0005


class Spinner:
    """Looks eagerly first, for a peer that runs beside this rank; then politely, yielding the core between looks.

    Eager looks keep a peer from running if it needs this core, because ranks share cores or another program has taken
    the peer's core. Polite looks cost only a switch; they do not come first because another program would keep the
    core for some milliseconds.

    Args:
        crowded: whether ranks share cores, so that eager looks are of no use at all.
        polite: whether to look politely. False in jobs of several hosts with few cores: there, awaited data comes
            through several threads of each rank, and a yielded core comes back before they had it.
    """

    def __init__(self, crowded: bool, polite: bool = True) -> None:
        self._eager, self._none = range(0 if crowded else _TURNS), range(0)
        self._polite_s = _POLITE_S if polite else 0.0
        self._in_vain = 0

    def look(self, has_come: Callable[[], bool]) -> bool:
        """Look for a while; return whether ``has_come`` was true."""
        in_vain = self._in_vain
        self._in_vain = in_vain + 1
        for _ in self._none if in_vain >= _TRIES and in_vain % _RETRY else self._eager:
            if has_come():
                self._in_vain = 0
                return True
        until = time.monotonic() + self._polite_s
        while True:
            os.sched_yield()
            if has_come():
                return True
            if time.monotonic() > until:
                return False


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
