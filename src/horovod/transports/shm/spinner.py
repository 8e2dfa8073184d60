"""How often to look before going to sleep."""

from __future__ import annotations

__all__ = ["Spinner"]

_TURNS = 300
#: After so many rounds in vain, spin only every so often.
_TRIES, _RETRY = 4, 16
#: And then longer, since the peer that stopped spinning as well has to wake up first.
_LONGER = 3


class Spinner:
    """Spinning is for a peer that runs beside this rank.

    If none does, for example because another program has taken its core, then it only keeps the peer from running;
    so it is tried again now and then only.

    Args:
        crowded: whether ranks share cores, so that it is of no use at all.
    """

    def __init__(self, crowded: bool) -> None:
        turns = 0 if crowded else _TURNS
        self._short, self._long = range(turns), range(turns * _LONGER)
        self._fruitless = 0

    def turns(self) -> range:
        """Return how often to look now; in vain, unless ``succeeded`` is called."""
        fruitless = self._fruitless
        self._fruitless = fruitless + 1
        if fruitless < _TRIES:
            return self._short
        return self._long if fruitless % _RETRY == 0 else range(0)

    def succeeded(self) -> None:
        """Note that the look was worth it."""
        self._fruitless = 0
