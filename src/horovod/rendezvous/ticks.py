"""Time for which a process ran, to find out for how long another one has been silent."""

from __future__ import annotations

import math

__all__ = ["Ticks"]


class Ticks:
    """Adds up the time between ticks.

    Args:
        longest_s: a longer pause means that this process did not run, so that nobody can have been heard.
    """

    def __init__(self, longest_s: float = 1.0) -> None:
        self._longest_s, self._now_s = longest_s, math.inf

    def passed_s(self, now_s: float) -> float:
        """Return the seconds since the last call, at most ``longest_s``; 0 in the first."""
        passed_s, self._now_s = min(max(0.0, now_s - self._now_s), self._longest_s), now_s
        return passed_s
