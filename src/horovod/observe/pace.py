"""How often to inspect something, if the time for an inspection grows with its size."""

from __future__ import annotations

import time

__all__ = ["Pace"]

#: The largest share of time for inspections, and the longest pause between two, in seconds.
_SHARE, _MOST_S = 1 / 16, 2.0


class Pace:
    """Limits repeated work inside of ``with pace`` to a small share of a thread's time."""

    def __init__(self) -> None:
        self._due_s = 0.0
        self._began_s = 0.0

    def is_due(self) -> bool:
        """Whether enough time has passed for the next inspection."""
        return time.monotonic() >= self._due_s

    def __enter__(self) -> None:
        # Processor time of this thread: waiting for a processor is not work.
        self._began_s = time.thread_time()

    def __exit__(self, *_: object) -> None:
        used_s = time.thread_time() - self._began_s
        self._due_s = time.monotonic() + min(used_s / _SHARE, _MOST_S)
