"""Bells in the control page: look for a while, then sleep on a futex."""

from __future__ import annotations

from collections.abc import Callable

from horovod.engine.ports import Doorbell
from horovod.transports.shm.control import HOLDER, NO_GOAL, PARKED, Control
from horovod.transports.shm.flags import Spinner

__all__ = ["ShmDoorbell"]


class ShmDoorbell(Doorbell):
    """See ``Doorbell``."""

    ring_deferred: Callable[[], None]
    look: Callable[[Callable[[], bool]], bool]

    def __init__(self, control: Control) -> None:
        self._control = control
        self._words = control.words32
        self._bell = control.bell[control.rank]
        self._mode = control.mode[control.rank]
        self.ring_deferred = control.ring_deferred
        self.look = Spinner(control.crowded, control.polite).look

    @property
    def share(self) -> int:
        return self._control.share

    def heard(self) -> int:
        return self._words[self._bell]

    def ring(self) -> None:
        self._control.ring(self._control.rank)

    def awake(self) -> int:
        words = self._words
        words[self._mode] = 0
        return words[self._bell]

    def park(self) -> None:
        self._words[self._mode] = PARKED
        self.ring_deferred()

    def announce(self, goal: int) -> None:
        self._control.announce(goal or NO_GOAL)

    def sleep(self, heard: int, timeout_s: float, parked: bool) -> None:
        self._control.sleep(heard, timeout_s, PARKED if parked else HOLDER)
