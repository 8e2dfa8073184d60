"""How often to look before going to sleep."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

__all__ = ["Spinner"]

_TURNS = 300
#: After so many waits in which that was in vain, only try it every so often; and then longer.
_TRIES, _RETRY, _LONGER = 4, 16, 3
#: To be woken takes up to a quarter of a millisecond on virtual machines, and some microseconds elsewhere.
_POLITE_S = 0.0005
#: Hyperthreads of one core: a look takes cycles from who is waited for, and to give the core away gives none back.
_SIBLINGS_TURNS, _SIBLINGS_POLITE_S = 60, 0.0001


class Spinner:
    """Looks eagerly first, for a peer that runs beside this rank; then politely, giving the core away between looks.

    Eager looks only keep a peer from running that needs this core, because ranks share cores, or another program has
    taken the peer's. Polite ones cost nobody anything but a switch; not to begin with them is for the sake of the core,
    which the other program would keep for some milliseconds. Of two hyperthreads of a core only one that sleeps leaves
    the core to the other.

    Args:
        crowded: whether ranks share cores, so that eager looks are of no use at all.
        siblings: whether ranks are hyperthreads of one core, so that any look slows down who is waited for.
        polite: whether to look politely. Not in jobs of several hosts with few cores: what is waited for comes through
            several threads of each rank there, and a core that is given away comes back before they had it.
    """

    def __init__(self, crowded: bool, siblings: bool = False, polite: bool = True) -> None:
        turns = 0 if crowded else _SIBLINGS_TURNS if siblings else _TURNS
        # With more ranks than cores there is always somebody to whom giving the core away is of use.
        self._polite_s = 0.0 if not polite else _SIBLINGS_POLITE_S if siblings and not crowded else _POLITE_S
        self._short, self._long, self._none = range(turns), range(turns * _LONGER), range(0)
        self._in_vain = 0
        self._eager = True

    def looks(self) -> Iterator[None]:
        """Return when to look; whoever found what it waits for says so, with ``succeeded``."""
        in_vain = self._in_vain
        self._in_vain = in_vain + 1
        self._eager = True
        for _ in self._short if in_vain < _TRIES else self._none if in_vain % _RETRY else self._long:
            yield
        self._eager = False
        until = time.monotonic() + self._polite_s
        while True:
            os.sched_yield()
            yield
            if time.monotonic() > until:
                return

    def succeeded(self) -> None:
        """Note that a look was worth it."""
        if self._eager:
            self._in_vain = 0
