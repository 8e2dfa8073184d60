"""Waiting during init(): until a deadline, with a log line every 30 s that names who is missing."""

from __future__ import annotations

import time
from collections.abc import Callable

from horovod.logs import logger

__all__ = ["Reminder"]

REMIND_S = 30.0
"""How often a process that waits logs whom it waits for."""


class Reminder:
    """Logs every ``REMIND_S`` seconds whom this process waits for.

    Args:
        timeout_s: seconds after which it will give up, for the message.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._began_s = time.monotonic()
        self._next_s = self._began_s + REMIND_S

    def look(self, missing: Callable[[], str]) -> None:
        """Log if it is time.

        Args:
            missing: returns who is missing, and what they have not done yet.
        """
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + REMIND_S
            logger.warning(
                f"init() has waited {now - self._began_s:.0f} s for {missing()}; it gives up after "
                f"{self._timeout_s:g} s (HOROVOD_START_TIMEOUT)"
            )
