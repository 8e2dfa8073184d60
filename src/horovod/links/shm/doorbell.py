"""Bells in the control page: look for a while, then sleep on a futex."""

from __future__ import annotations

from horovod.transports.shm.control import HOLDER, NO_GOAL, PARKED, Control
from horovod.transports.shm.flags import Spinner

__all__ = ["ShmDoorbell"]


class ShmDoorbell:
    """See ``Doorbell``."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._words = control.words32
        self._bell = control.bell[control.rank]
        self._mode = control.mode[control.rank]
        self.ring_deferred = control.ring_deferred
        self.look = Spinner(control.crowded, control.polite).look

    @property
    def share(self) -> int:
        """Number of cores for this rank."""
        return self._control.share

    def heard(self) -> int:
        """Return how often this rank's doorbell has rung."""
        return self._words[self._bell]

    def ring(self) -> None:
        """Wake this rank's own sleepers."""
        self._control.ring(self._control.rank)

    def awake(self) -> int:
        """Announce that a thread of this rank looks by itself; return how often the doorbell has rung."""
        words = self._words
        words[self._mode] = 0
        return words[self._bell]

    def park(self) -> None:
        """Announce that only the background thread sleeps here, and ring for the ranks left for later."""
        self._words[self._mode] = PARKED
        self.ring_deferred()

    def announce(self, goal: int) -> None:
        """Announce that the lock's holder is going to sleep."""
        self._control.announce(goal or NO_GOAL)

    def sleep(self, heard: int, timeout_s: float, parked: bool) -> None:
        """Sleep until this rank's doorbell has rung more often than ``heard``."""
        self._control.sleep(heard, timeout_s, PARKED if parked else HOLDER)
