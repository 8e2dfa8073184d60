"""A thread that wakes this rank as soon as the process of another rank of its host ends."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Iterable

__all__ = ["EndWatch"]


class EndWatch:
    """See the module. It only saves time: a waiting thread also looks by itself, ten times a second.

    ``on_end`` is called in the thread, after each end. The pidfds stay the caller's, open until ``close``.
    """

    def __init__(self, pid_fds: Iterable[int], on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._poll = select.poll()
        for fd in pid_fds:
            self._poll.register(fd, select.POLLIN)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._bell, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="horovod-ends", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and wait for it."""
        with contextlib.suppress(OSError):  # other code in this process has closed it: then poll reports that
            os.eventfd_write(self._bell, 1)
            self._thread.join()
            os.close(self._bell)

    def _run(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._bell:
                    return
                self._poll.unregister(fd)
            with contextlib.suppress(ValueError):  # the control page is gone: this rank leaves
                self._on_end()
