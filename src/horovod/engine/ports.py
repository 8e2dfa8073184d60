"""The protocols between the engine and its surroundings: channel, doorbell, peers, board, transport, observer.

A *link* assembles one set of ``Channel``, ``Doorbell``, ``Peers``, ``Board`` and ``Transport``: one for a rank alone,
one for the ranks of a host. The engine depends on none of these sets, and none of them depends on the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from horovod.core.coordinator import LogEntry
from horovod.core.requests import Request
from horovod.errors import HorovodInternalError
from horovod.transports.base import Transport, Watch

__all__ = [
    "SILENT",
    "Channel",
    "Doorbell",
    "Observer",
    "Peers",
    "Transport",
    "Watch",
]


class Channel(Protocol):
    """One rank's path to the coordinator, and the log's path back."""

    patient: bool  # whether the thread that makes progress now waits for a result itself; then it need not wake others

    def declare(self, signature: int, request: Request) -> None:
        """Let a number stand for a request."""

    def submit(self, signature: int, note: int, patient: bool) -> None:
        """Submit a declared request; ``note`` is a number from the transport for those of the other members."""

    def leave(self, reason: str) -> None:
        """Leave the job."""

    def has_news(self) -> bool:
        """Whether ``next`` has an entry, or the coordinator has work."""

    def next(self) -> LogEntry | None:
        """Return the next log entry, or None."""

    def is_behind(self) -> bool:
        """Whether records wait for a slow reader; then sleep only briefly."""

    def tend(self, fate: Callable[[int], str]) -> None:
        """Where the coordinator runs: tell it which ranks have left silently, and publish its decisions. ``fate`` says
        in words how a rank ended.
        """


class Doorbell(Protocol):
    """Lets a rank sleep until an event, and wakes other ranks.

    The engine's thread and a thread that waits for a result may sleep here at once: a ring wakes both.
    """

    @property
    def share(self) -> int:
        """Number of cores for this rank, at least 1."""

    def heard(self) -> int:
        """Return how often this rank's doorbell has rung."""

    def ring(self) -> None:
        """Wake this rank's own engine."""

    def ring_deferred(self) -> None:
        """Wake the ranks that ``Channel.submit`` left for later; call before this rank sleeps or does other work."""

    def awake(self) -> int:
        """Announce that this rank's engine looks by itself and needs no ring; return the value of ``heard``."""

    def park(self) -> None:
        """Announce that the engine is going to sleep while its rank does other work, and ``ring_deferred``.

        Check for the awaited news once more after this call.
        """

    def announce(self, goal: int) -> None:
        """Announce that the engine is going to sleep while its rank waits; check for news once more after this call.

        It goes on when all members have reached the fence ``goal``; 0 if it waits for none.
        """

    def sleep(self, heard: int, timeout_s: float, parked: bool) -> None:
        """Sleep until this rank's doorbell has rung more often than ``heard``, an earlier result of that method.
        ``parked``: the rank does other work meanwhile.
        """

    def look(self, has_come: Callable[[], bool], /) -> bool:
        """Check ``has_come`` for a while before going to sleep; return whether it was true."""


class Peers(Protocol):
    """The other ranks' processes: whether they live, whether they have left, how they ended."""

    def enter(self) -> None:
        """Say that this rank takes part."""

    def leave(self, culprit: int) -> None:
        """Say that this rank has left, because of ``culprit`` unless that is -1."""

    def fail(self, culprit: int) -> None:
        """Say that this rank has failed, because of ``culprit`` unless that is -1."""

    def is_alarmed(self) -> bool:
        """Whether a rank has ended, failed or left since the last call of ``gone``."""

    def has_left(self, rank: int) -> bool:
        """Whether ``rank`` has said that it has left."""

    def has_failed(self, rank: int) -> bool:
        """Whether ``rank`` has said that it has failed, or is known to have died."""

    def gone(self) -> int | None:
        """Return a rank that died or failed without leaving, or that made another rank fail; None if all is well."""

    def culprit_of(self, rank: int) -> int:
        """Return the rank because of which ``rank`` left."""

    def has_ended(self, rank: int) -> bool:
        """Whether the process of ``rank`` has ended; for any thread."""

    def fate(self, rank: int, why: str = "") -> str:
        """Return in words how ``rank`` ended; ``why`` is the reason that it gave."""

    def process(self, rank: int) -> tuple[str, float]:
        """Return the kernel's data on the process of ``rank``: the letter of its state in /proc, X when it is gone
        and ``?`` when it is not known here (yet); and the seconds of processor time that it has used.
        """

    def wait_for_end(self, rank: int, timeout_s: float) -> None:
        """Wait until the process of ``rank`` has ended, ``timeout_s`` seconds at most."""

    def close(self) -> None:
        """Release the resources of this process."""


class Observer:
    """Watches an engine: learns its events, and now and then checks its health. This one does nothing.

    ``attend``, ``tick`` and ``in_execution`` are called by the thread that has the turn.
    """

    def begin(self, subject: Any) -> None:
        """Take the ``Engine`` to observe; called once, before all other methods."""

    def start(self) -> None:
        """Note that the rank takes part from now on."""

    @property
    def is_busy(self) -> bool:
        """Whether ``tick`` should be called again soon."""
        return False

    def attend(self) -> None:
        """Answer other ranks' questions, if there are any."""

    def tick(self) -> None:
        """Check whether an operation waits for too long.

        Raises:
            StallError: an operation has waited for too long.
        """

    def in_execution(self, rank: int, waited_s: float) -> None:
        """Check whether this rank has waited for ``rank`` for too long in the middle of an operation.

        Raises:
            StallError: this rank has waited for too long.
        """

    def failed(self, failure: HorovodInternalError) -> None:
        """Note that the rank has failed."""

    def stop(self) -> None:
        """Note that the rank is about to leave; called by the thread that stops it, which may be interrupted."""

    def conclude(self) -> None:
        """Note that the rank leaves now; called by the engine's thread."""

    def close(self) -> None:
        """Note that the link is about to be released."""


#: The observer of an engine without observer.
SILENT = Observer()
