"""Waiting: until a deadline, with a log line every 30 s that names the missing ranks; and for how long it lasted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from horovod.logs import logger

if TYPE_CHECKING:
    import zmq  # ranks of one host do not load it

__all__ = ["Patience", "Ticks"]

REMIND_S = 30.0
"""Interval at which a waiting process logs which ranks or hosts it waits for."""
_LOOK_S = 0.1
_READABLE = 1  # zmq.POLLIN


class Patience:
    """A deadline, a check that may end a wait before it, and a log line for a wait that takes long.

    ``check`` is called several times a second, and raises an error when waiting has become useless.
    """

    def __init__(self, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
        self.total_s, self.deadline, self.check = timeout_s, time.monotonic() + timeout_s, check
        self._began_s = time.monotonic()
        self._next_s = self._began_s + REMIND_S

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.deadline - time.monotonic()

    def poll(self, socket: zmq.Socket[bytes], events: int = _READABLE) -> bool:
        """Wait for a moment, or until a socket is ready; return whether it is, or time is left."""
        left_s = self.left_s
        limit_ms = int(max(0.0, min(_LOOK_S, left_s)) * 1000)
        is_ready = bool(socket.poll(limit_ms, events))
        self.check()
        return is_ready or left_s > 0

    def remind(self, missing: str) -> None:
        """Log every ``REMIND_S`` seconds what this process waits for, such as "rank 0 to call init()"."""
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + REMIND_S
            logger.warning(
                f"init() has waited {now - self._began_s:.0f} s for {missing}; it gives up after "
                f"{self.total_s:g} s (HOROVOD_START_TIMEOUT)"
            )


class Ticks:
    """Adds up the time for which this process ran, to find out for how long another one has been silent.

    Args:
        longest_s: a longer pause means that this process did not run, so that nobody can have been heard.
    """

    def __init__(self, longest_s: float = 1.0) -> None:
        self._longest_s, self._now_s = longest_s, math.inf

    def passed_s(self, now_s: float) -> float:
        """Return the seconds since the last call, at most ``longest_s``; 0 in the first."""
        passed_s, self._now_s = min(max(0.0, now_s - self._now_s), self._longest_s), now_s
        return passed_s
