"""Looks for an event for a while before going to sleep."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

__all__ = ["Spinner"]

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
