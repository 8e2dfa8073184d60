"""The doorbell of a rank that is alone on its host: it sleeps until another host sends something, or it is rung."""

from __future__ import annotations

import contextlib
import os
import select
import weakref
from collections.abc import Callable

from horovod.links.hosts.wire import Wire
from horovod.links.shm.doorbell import ShmDoorbell
from horovod.transports.shm.control import Control
from horovod.transports.shm.flags import Spinner

__all__ = ["WireDoorbell"]


class _Sleeper:
    """Descriptors on which one thread sleeps; each thread has its own, because it resets its event when it wakes.

    They are closed when no reference to this object is left: another thread may be about to write to them.
    """

    def __init__(self, wire_fd: int) -> None:
        self._wire_fd = wire_fd
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self.fd).atexit = False  # at exit, the engine still rings
        self.poll = select.epoll()
        self.poll.register(self.fd, select.EPOLLIN)
        self.poll.register(wire_fd, 0)

    def watch(self, is_watching: bool) -> None:
        """Set whether messages of other hosts wake the thread, even if it sleeps already."""
        self.poll.modify(self._wire_fd, select.EPOLLIN if is_watching else 0)


class WireDoorbell(ShmDoorbell):
    """See ``Doorbell``. The engine's own thread does not wake for messages while another thread looks for them."""

    def __init__(self, control: Control, wire: Wire, has_messages: Callable[[], bool]) -> None:
        super().__init__(control)
        self._wire, self._has_messages = wire, has_messages
        self._free: list[_Sleeper] = []
        self._asleep: list[_Sleeper] = []
        self._parked: list[_Sleeper] = []
        self._is_awake = False
        # Messages come through a thread of ZeroMQ, which needs a core: yield this one between looks.
        self.look = Spinner(crowded=True).look

    def ring(self) -> None:
        super().ring()
        self.rouse()

    def rouse(self) -> None:
        """Wake this rank's sleepers, whose bell was rung in the control page."""
        for sleeper in list(self._asleep):
            os.eventfd_write(sleeper.fd, 1)

    def awake(self) -> int:
        if not self._is_awake:
            self._is_awake = True
            for sleeper in list(self._parked):
                sleeper.watch(False)
        return super().awake()

    def park(self) -> None:
        super().park()
        if self._is_awake:
            self._is_awake = False
            for sleeper in list(self._parked):
                sleeper.watch(True)
            if self._has_messages():
                # Messages came while this thread sent its own.
                self.ring()

    def sleep(self, heard: int, timeout_s: float, parked: bool) -> None:
        """Sleep until the doorbell has rung more often than ``heard``, or another host has sent something."""
        try:
            sleeper = self._free.pop()
        except IndexError:  # none is free, or another thread was faster
            sleeper = _Sleeper(self._wire.fd)
        self._asleep.append(sleeper)
        if parked:
            self._parked.append(sleeper)
        sleeper.watch(not (parked and self._is_awake))
        try:
            if self._words[self._bell] == heard and any(fd != sleeper.fd for fd, _ in sleeper.poll.poll(timeout_s)):
                self._wire.pump()
        finally:
            self._asleep.remove(sleeper)
            if parked:
                self._parked.remove(sleeper)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(sleeper.fd)
            self._free.append(sleeper)

    def close(self) -> None:
        """Release the descriptors, when no thread sleeps here any more."""
        self._free.clear()
