"""How far the clock of another host is from this one's: told by the quickest of some round trips."""

from __future__ import annotations

__all__ = ["Clock"]

#: By how much a round trip may be slower than the best one and still renew what is known, and so follow a drift.
_RENEWS = 1.1


class Clock:
    """See the module.

    Attributes:
        offset_ns: what to add to this host's clock to get the other's.
        samples: how many round trips there were.
    """

    def __init__(self) -> None:
        self.offset_ns = 0
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
