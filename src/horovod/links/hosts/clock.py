"""The offset between the clocks of two hosts, from the quickest of several round trips."""

from __future__ import annotations

import threading

__all__ = ["Clock"]

#: Round trips after which the offset counts as known.
_ENOUGH = 8

#: A round trip up to this much slower than the best one still updates the estimate, to follow a drift.
_RENEWS = 1.1


class Clock:
    """See the module.

    Attributes:
        offset_ns: nanoseconds to add to this host's clock to get the other's.
        samples: how many round trips there were.
        is_known: set after some round trips.
    """

    def __init__(self) -> None:
        self.offset_ns = 0
        self.is_known = threading.Event()
        self.samples = 0
        self._best_ns = 0

    def note(self, sent_ns: int, there_ns: int, back_ns: int) -> None:
        """Take one round trip.

        Args:
            sent_ns: when it began, on this host's clock.
            there_ns: when it was answered, on the other's.
            back_ns: when it ended, on this host's clock.
        """
        took_ns = back_ns - sent_ns
        if took_ns < 0:
            return
        if not self.samples or took_ns <= self._best_ns * _RENEWS:
            self._best_ns = min(took_ns, self._best_ns or took_ns)
            self.offset_ns = there_ns - (sent_ns + back_ns) // 2
        self.samples += 1
        if self.samples >= _ENOUGH:
            self.is_known.set()
