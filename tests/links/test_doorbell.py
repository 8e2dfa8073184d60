"""The doorbell of a rank that is alone on its host."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

import pytest

from horovod.links.hosts.doorbell import WireDoorbell


def test_a_thread_that_rings_late_writes_to_no_closed_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sleeper wakes, and the doorbell is closed, while another thread is about to ring once more."""
    reading, writing = os.pipe()
    control = SimpleNamespace(
        rank=0, words32=[0, 0], bell=[0], mode=[1], crowded=True, polite=False, ring_deferred=lambda: None
    )
    wire = SimpleNamespace(fd=reading, pump=lambda: None)
    bell = WireDoorbell(control, wire, lambda: False)  # type: ignore[arg-type]
    thread = threading.Thread(target=bell.sleep, args=(0, 60.0, True))
    thread.start()
    while not bell._asleep:
        time.sleep(0.001)
    fds: list[int] = []
    write = os.eventfd_write

    def late(fd: int, value: int) -> None:
        fds.append(fd)
        write(fd, value)
        thread.join()
        bell.close()
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", late)
    bell.rouse()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fds[0])  # it was closed after that
    for fd in (reading, writing):
        os.close(fd)
