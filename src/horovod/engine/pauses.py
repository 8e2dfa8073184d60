"""When the engine's thread keeps out of the caller's way."""

from __future__ import annotations

import contextlib
import math
import time
from _thread import allocate_lock
from collections.abc import Callable

from horovod.engine.records import now

__all__ = ["Courtesy", "Nap"]

#: A caller that has submitted nothing for so long does something else now; and how often to wait for that.
_QUIET_S, _PAUSES = 0.0005, 40
#: Who calls one operation after the other comes back within that; to wake a thread that naps costs least.
_NAP_S = 0.0002


class Courtesy:
    """Lets a caller, who has no other core, submit one operation after the other.

    To take turns made fifty allreduces of 1 MiB a fifth slower.

    Attributes:
        submitted_ns: when the caller has last submitted what it does not wait for; 0 if never.
    """

    def __init__(self) -> None:
        self.submitted_ns = 0

    def wait(self, is_wanted: Callable[[], bool]) -> None:
        """Pause while the caller submits.

        Args:
            is_wanted: whether the thread is needed at once.
        """
        for _ in range(_PAUSES):
            left = _QUIET_S - self._quiet_s()
            if left <= 0 or is_wanted():
                return
            time.sleep(left)

    def _quiet_s(self) -> float:
        submitted = self.submitted_ns
        return (now() - submitted) / 1e9 if submitted else math.inf


class Nap:
    """Waits for a caller that is likely to come back at once.

    Other ranks see this one awake, and do not ring: they are heard at the end of the nap.

    Attributes:
        is_taken: whether a thread naps.
    """

    def __init__(self) -> None:
        self.is_taken = False
        self._lock = allocate_lock()
        self._lock.acquire()

    def take(self, is_wanted: Callable[[], bool]) -> bool:
        """Nap; return whether the caller has come, or the thread is needed otherwise."""
        self.is_taken = True
        came = is_wanted() or self._lock.acquire(True, _NAP_S)
        self.is_taken = False
        return came

    def end(self) -> None:
        """Wake who naps."""
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._lock.release()
