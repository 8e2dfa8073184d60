"""The protocols between the engine and its surroundings: channel, doorbell, peers, board, transport, observer.

A *link* assembles one set of ``Channel``, ``Doorbell``, ``Peers``, ``Board`` and ``Transport``: one for a rank alone,
one for the ranks of a host. The engine knows none of them, and neither of them knows the engine.
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
            note: what the transport sends along, for those of the other members.
            patient: whether the caller is about to wait for it.
        """

    def leave(self, reason: str) -> None:
        """Take part no more."""

    def has_news(self) -> bool:
        """Whether ``next`` has something, or the coordinator has work."""

    def next(self) -> LogEntry | None:
        """Return the next log entry, or None."""

    def is_behind(self) -> bool:
        """Whether records wait for a slow reader; then sleep only briefly."""

    def tend(self, fate: Callable[[int], str]) -> None:
        """Where the coordinator runs: tell it who has left without a word, and publish what it decided.

        Args:
            fate: says in words how a rank ended.
        """


class Doorbell(Protocol):
    """Sleep until something happened, and wake others.

    The engine's thread and one that waits for a result may sleep here at once: what wakes a rank wakes both.
    """

    @property
    def share(self) -> int:
        """Cores that there are for this rank, at least 1."""

    def heard(self) -> int:
        """Return how often this rank was rung for."""

    def ring(self) -> None:
        """Wake this rank's own engine."""

    def ring_deferred(self) -> None:
        """Wake those whom ``Channel.submit`` left for later; before this rank sleeps or does other things."""

    def awake(self) -> int:
        """Say that this rank's engine looks by itself, so that nobody need wake it; return what ``heard`` does."""

    def park(self) -> None:
        """Say that the engine is going to sleep while its rank does something else, and ``ring_deferred``.

        Look once more, after this call, for the news that it sleeps for.
        """

    def announce(self, goal: int) -> None:
        """Say that the engine is going to sleep while its rank waits; what it waits for must be looked at once more.

        Args:
            goal: the number of settled entries that all members must reach before it goes on; 0 if it waits for none.
        """

    def sleep(self, heard: int, timeout_s: float, parked: bool) -> None:
        """Sleep until this rank was rung for more often than ``heard``.

        Args:
            heard: see there.
            timeout_s: seconds, at most.
            parked: whether the rank does something else meanwhile.
        """

    def look(self, has_come: Callable[[], bool]) -> bool:
        """Look for a while before going to sleep; return whether ``has_come`` was true."""


class Peers(Protocol):
    """The other ranks' processes: who is alive, who has left, how they ended."""

    def enter(self) -> None:
        """Say that this rank takes part."""

    def leave(self, culprit: int) -> None:
        """Say that this rank has left, because of ``culprit`` unless that is -1."""

    def fail(self, culprit: int) -> None:
        """Say that this rank has failed, because of ``culprit`` unless that is -1."""

    def is_alarmed(self) -> bool:
        """Whether a rank has ended, failed or left since ``gone`` has looked."""

    def has_left(self, rank: int) -> bool:
        """Whether ``rank`` has said that it has left."""

    def gone(self) -> int | None:
        """Return a rank that died or failed without leaving, or because of which one failed; None if all is well."""

    def culprit_of(self, rank: int) -> int:
        """Return because of whom ``rank`` left."""

    def has_ended(self, rank: int) -> bool:
        """Whether the process of ``rank`` has ended; for any thread."""

    def fate(self, rank: int, why: str = "") -> str:
        """Return in words how ``rank`` ended; ``why`` is what it said itself."""

    def process(self, rank: int) -> tuple[str, float]:
        """Return what the kernel says about the process of ``rank``: the letter of its state in /proc, X when it is
        gone and ``?`` when that is not known here (yet); and the seconds of processor time that it has used.
        """

    def wait_for_end(self, rank: int, timeout_s: float) -> None:
        """Wait until the process of ``rank`` has ended, ``timeout_s`` seconds at most."""

    def close(self) -> None:
        """Release what this process holds."""


class Progress(Protocol):
    """The operations of a rank that are in flight, and its place in the log."""

    def advance(self) -> None:
        """Execute what the log holds."""

    def in_flight(self) -> list[Handle]:
        """Return every submission that is not done."""

    def describe(self, handle: Handle) -> str:
        """Return a submission in words."""

    def is_idle(self) -> bool:
        """Whether nothing is in flight."""

    def has_news(self) -> bool:
        """Whether there is something to do."""

    def late(self) -> int:
        """Return a rank that has not done its part of what this one has, or -1."""


class Monitor(Watch, Protocol):
    """Says when there is no point in waiting; a ``Watch`` for transports, too.

    Attributes:
        aborted: with what every wait ends; None as long as it may go on.
    """

    aborted: HorovodInternalError | None

    def tick(self, log: Progress, channel: Channel, waited_s: float) -> None:
        """Raise when waiting for the log is pointless; at home also tell the coordinator who has left.

        Args:
            log: what this rank waits for.
            channel: its path to the coordinator.
            waited_s: how long this rank has waited, in seconds.
        """

    def abort(self, error: HorovodInternalError) -> None:
        """End what this rank waits for, at its next look; called by any thread."""


@dataclass(frozen=True)
class Link:
    """One rank's connections to its job.

    Attributes:
        rank: this rank.
        generation: who takes part.
        channel: its path to the coordinator.
        transport: moves the bytes.
        coordinator: at home, else None.
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
        """Why it takes part no more, or None."""

    def in_flight(self) -> list[Handle]:
        """Return every submission that is not done."""

    def waits(self) -> dict[int, Handle]:
        """Return what threads wait for, by identifier."""

    def count(self, request: Request) -> tuple[int, int]:
        """Return how often this rank has submitted an operation of this name, and how many in all."""

    def stats(self) -> Stats:
        """Return what this rank has done, in numbers."""


class Observer(Protocol):
    """Watches an engine: learns what happens, and says now and then whether all is well.

    ``attend``, ``tick`` and ``in_execution`` are called by the thread that has the turn.
    """

    def begin(self, subject: Subject) -> None:
        """Take note of whom to observe; called once, before anything else."""

    def start(self) -> None:
        """The rank takes part from now on."""

    @property
    def is_busy(self) -> bool:
        """Whether ``tick`` should come again soon."""

    def attend(self) -> None:
        """Answer other ranks' questions, if there are any."""

    def tick(self) -> None:
        """Look whether something waits for too long.

        Raises:
            StallError: it has.
        """

    def in_execution(self, rank: int, waited_s: float) -> None:
        """Look whether ``rank`` is waited for, in the middle of an operation, for too long.

        Raises:
            StallError: it is.
        """

    def failed(self, failure: HorovodInternalError) -> None:
        """The rank takes part no more."""

    def stop(self) -> None:
        """The rank is about to leave; called by the thread that wants it, which may be interrupted."""

    def conclude(self) -> None:
        """The rank leaves now; called by the engine's thread."""

    def close(self) -> None:
        """The link is about to be released."""


class _Silent:
    """Sees nothing and says nothing."""

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


#: The observer of an engine that nobody observes.
SILENT: Observer = _Silent()
