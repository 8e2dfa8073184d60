"""The protocols between the engine and its surroundings: channel, doorbell, peers, board, transport, observer.

A *link* assembles one set of ``Channel``, ``Doorbell``, ``Peers``, ``Board`` and ``Transport``: one for a rank alone,
one for the ranks of a host. The engine depends on none of these sets, and none of them depends on the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from horovod.core.coordinator import Coordinator, LogEntry
from horovod.core.generation import Generation
from horovod.core.requests import Request
from horovod.engine.board import Board
from horovod.engine.handles import Handle
from horovod.engine.stats import Stats
from horovod.engine.times import Ring
from horovod.errors import HorovodInternalError
from horovod.transports.base import Transport, Watch

__all__ = [
    "SILENT",
    "Channel",
    "Doorbell",
    "Link",
    "Monitor",
    "Observer",
    "Peers",
    "Progress",
    "Subject",
    "Transport",
    "Watch",
]


class Channel(Protocol):
    """One rank's path to the coordinator, and the log's path back.

    Attributes:
        patient: whether the thread that makes progress now waits for a result itself; then it need not wake others.
    """

    patient: bool

    def declare(self, signature: int, request: Request) -> None:
        """Let a number stand for a request."""

    def submit(self, signature: int, note: int, patient: bool) -> None:
        """Submit a declared request.

        Args:
            signature: its number.
            note: a number from the transport for the transports of the other members.
            patient: whether the caller is about to wait for it.
        """

    def leave(self, reason: str) -> None:
        """Leave the job."""

    def has_news(self) -> bool:
        """Whether ``next`` has an entry, or the coordinator has work."""

    def next(self) -> LogEntry | None:
        """Return the next log entry, or None."""

    def is_behind(self) -> bool:
        """Whether records wait for a slow reader; then sleep only briefly."""

    def tend(self, fate: Callable[[int], str]) -> None:
        """Where the coordinator runs: tell it which ranks have left silently, and publish its decisions.

        Args:
            fate: returns in words how a rank ended.
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

        Args:
            goal: the fence that all members must reach before it goes on; 0 if it waits for none.
        """

    def sleep(self, heard: int, timeout_s: float, parked: bool) -> None:
        """Sleep until this rank's doorbell has rung more often than ``heard``.

        Args:
            heard: an earlier result of the method ``heard``.
            timeout_s: seconds, at most.
            parked: whether the rank does other work meanwhile.
        """

    def look(self, has_come: Callable[[], bool]) -> bool:
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


class Progress(Protocol):
    """The operations of a rank that are in flight, and its place in the log."""

    def advance(self) -> None:
        """Execute the new log entries.

        Raises:
            HorovodInternalError: an entry could not be executed; this rank is out of step for good.
        """

    def in_flight(self) -> list[Handle]:
        """Return every submission that is not done."""

    def describe(self, handle: Handle) -> str:
        """Return a submission in words."""

    def is_idle(self) -> bool:
        """Whether nothing is in flight."""

    def has_news(self) -> bool:
        """Whether there is something to do."""

    def late(self) -> int:
        """Return a rank that has not done its part of an operation while this rank has; -1 if there is none."""


class Monitor(Watch, Protocol):
    """Raises an error when waiting is pointless; also a ``Watch`` for transports.

    Attributes:
        aborted: the error with which every wait ends; None while waits may go on.
    """

    aborted: HorovodInternalError | None

    def tick(self, log: Progress, channel: Channel, waited_s: float) -> None:
        """Raise when waiting for the log is pointless; at home also tell the coordinator which ranks have left.

        Args:
            log: this rank's operations in flight, and its place in the log.
            channel: its path to the coordinator.
            waited_s: how long this rank has waited, in seconds.
        """

    def abort(self, error: HorovodInternalError) -> None:
        """End the waits of this rank, at its next check; called by any thread."""


@dataclass(frozen=True)
class Link:
    """One rank's connections to its job.

    Attributes:
        rank: this rank.
        generation: the members of the job.
        channel: its path to the coordinator.
        transport: moves the bytes.
        coordinator: the coordinator if it runs here, else None.
        doorbell: lets its engine sleep.
        peers: None for a rank alone.
        board: None for a rank alone.
        watch: None for a rank alone.
    """

    rank: int
    generation: Generation
    channel: Channel
    transport: Transport
    doorbell: Doorbell
    coordinator: Coordinator | None = None
    peers: Peers | None = None
    board: Board | None = None
    watch: Monitor | None = None


class Subject(Protocol):
    """An engine, as its observer sees it."""

    @property
    def link(self) -> Link:
        """Its connections."""

    @property
    def ring(self) -> Ring:
        """The records of its operations."""

    @property
    def position(self) -> int:
        """How many entries of the log it has executed or skipped, the present one included."""

    @property
    def failure(self) -> HorovodInternalError | None:
        """The error that ended its participation, or None."""

    def in_flight(self) -> list[Handle]:
        """Return every submission that is not done."""

    def waits(self) -> dict[int, Handle]:
        """Return the handle that each thread waits for, by thread identifier."""

    def count(self, request: Request) -> tuple[int, int]:
        """Return how often this rank has submitted an operation of this name, and how many in all."""

    def stats(self) -> Stats:
        """Return the statistics of this rank."""


class Observer(Protocol):
    """Watches an engine: learns its events, and now and then checks its health.

    ``attend``, ``tick`` and ``in_execution`` are called by the thread that has the turn.
    """

    def begin(self, subject: Subject) -> None:
        """Take the engine to observe; called once, before all other methods."""

    def start(self) -> None:
        """Note that the rank takes part from now on."""

    @property
    def is_busy(self) -> bool:
        """Whether ``tick`` should be called again soon."""

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


class _Silent:
    """An observer that does nothing."""

    is_busy = False

    def begin(self, subject: Subject) -> None: ...

    def start(self) -> None: ...

    def attend(self) -> None: ...

    def tick(self) -> None: ...

    def in_execution(self, rank: int, waited_s: float) -> None: ...

    def failed(self, failure: HorovodInternalError) -> None: ...

    def stop(self) -> None: ...

    def conclude(self) -> None: ...

    def close(self) -> None: ...


#: The observer of an engine without observer.
SILENT: Observer = _Silent()
