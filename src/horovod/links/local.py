"""The link of a rank alone: it calls the coordinator directly, and there is no other rank to wait for."""

from __future__ import annotations

import collections
import contextlib
import os
from _thread import LockType, allocate_lock
from collections.abc import Callable
from typing import Protocol

from horovod.config import Config
from horovod.core.coordinator import Coordinator, LogEntry
from horovod.core.generation import Generation, Member
from horovod.core.requests import Request
from horovod.engine.link import Link
from horovod.engine.ports import Channel, Doorbell
from horovod.transports.local import LocalTransport

__all__ = ["Decider", "LocalChannel", "LocalDoorbell", "assemble"]


class Decider(Protocol):
    """Takes requests and gives the log: the coordinator, or its proxy on another host."""

    def declare(self, rank: int, signature: int, request: Request) -> None:
        """Let ``signature`` stand for ``request`` when ``rank`` submits it."""

    def submit(self, rank: int, signature: int, note: int) -> None:
        """Take one submission of ``rank``."""

    def leave(self, rank: int, reason: str) -> None:
        """Note that ``rank`` has left."""

    def take(self) -> list[LogEntry]:
        """Return the log entries since the last call."""


class LocalChannel(Channel):
    """The path of the rank at which the coordinator runs; see ``Channel``."""

    patient = False

    def __init__(self, coordinator: Decider, rank: int) -> None:
        self._coordinator = coordinator
        self._rank = rank
        self._has_come = False  # whether there are submissions whose answers were not taken yet
        self._log: collections.deque[LogEntry] = collections.deque()

    def declare(self, signature: int, request: Request) -> None:
        self._coordinator.declare(self._rank, signature, request)

    def submit(self, signature: int, note: int, patient: bool) -> None:
        self._coordinator.submit(self._rank, signature, note)
        self._has_come = True

    def leave(self, reason: str) -> None:
        self._serve()
        self._coordinator.leave(self._rank, reason)
        self._publish()

    def has_news(self) -> bool:
        return self._has_come or bool(self._log)

    def next(self) -> LogEntry | None:
        if not self._log:
            self._serve()
        return self._log.popleft() if self._log else None

    def is_behind(self) -> bool:
        return False

    def tend(self, fate: Callable[[int], str]) -> None:
        self._publish()

    def _serve(self) -> None:
        """Let the coordinator answer new submissions."""
        if self._has_come:
            self._publish()

    def _publish(self) -> None:
        """Append the coordinator's decisions to the log."""
        self._has_come = False
        self._log.extend(self._coordinator.take())


class LocalDoorbell(Doorbell):
    """Lets the engine of a rank alone sleep; see ``Doorbell``."""

    share = 1 << 30

    def __init__(self) -> None:
        self._rings = 0
        # One lock per sleeper: the engine's thread and a waiting thread may sleep at the same time.
        self._asleep: list[LockType] = []

    def heard(self) -> int:
        return self._rings

    def ring(self) -> None:
        self._rings += 1
        for lock in list(self._asleep):
            with contextlib.suppress(RuntimeError):  # another ring has released it
                lock.release()

    def ring_deferred(self) -> None:
        """Do nothing: no rank was left for later."""

    def awake(self) -> int:
        return self._rings

    def park(self) -> None:
        """Do nothing: there is no peer to tell."""

    def announce(self, goal: int) -> None:
        """Do nothing: there is no peer to tell."""

    def sleep(self, heard: int, timeout_s: float, parked: bool) -> None:
        lock = allocate_lock()
        lock.acquire()
        self._asleep.append(lock)
        try:
            if heard == self._rings:
                lock.acquire(True, timeout_s)
        finally:
            self._asleep.remove(lock)

    def look(self, has_come: Callable[[], bool]) -> bool:
        return False


def assemble(settings: Config, number: int = 1) -> Link:
    """Return the link of a world of one."""
    generation = Generation([Member(os.getpid(), os.uname().nodename)], number=number)
    coordinator = Coordinator(generation, settings.fusion_threshold_bytes, max(1, settings.cache_capacity))
    return Link(0, generation, LocalChannel(coordinator, 0), LocalTransport(), LocalDoorbell(), coordinator)
