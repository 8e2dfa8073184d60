"""How often to look before going to sleep."""

from __future__ import annotations

__all__ = ["Spinner"]

_TURNS = 300
#: Where to be woken takes long, as in some virtual machines, more looks are cheaper than a nap; about half a
#: millisecond of them.
_MOST_TURNS = 16 * _TURNS
#: After so many short naps in a row, spin only every so often; then at length, since the peer has to wake up first.
_TRIES, _RETRY = 6, 64
#: A longer sleep was none for lack of patience: the peer had something else to do.
_NAP_S = 0.002


class Spinner:
    """Spinning is for a peer that runs beside this rank and is about to come.

    If it does not run, for example because another program has taken its core, then spinning only keeps it from
    running. Both look the same at first: a short sleep. So a rank tries more patience, and gives up if that is of no
    use.

    Args:
        crowded: whether ranks share cores, so that it is of no use at all.
    """

    def __init__(self, crowded: bool) -> None:
        self._least = range(0 if crowded else _TURNS)
        self._most = range(0 if crowded else _MOST_TURNS)
        self._turns = self._least
        self._naps = 0

    def turns(self) -> range:
        """Return how often to look now."""
        naps = self._naps
        if naps < _TRIES:
            return self._turns
        return self._most if naps % _RETRY == 0 else range(0)

    def succeeded(self) -> None:
        """Note that a look was worth it."""
        self._naps = 0

    def slept(self, seconds: float) -> None:
        """Note that looking was in vain, and how long this rank slept then."""
        if seconds > _NAP_S:
            self._naps = 0
            self._turns = self._least
            return
        self._naps += 1
        self._turns = range(min(2 * len(self._turns), len(self._most)))
