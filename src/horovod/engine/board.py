"""The board: questions and answers of ranks beside the log."""

from __future__ import annotations

from typing import NamedTuple, Protocol

__all__ = ["EVERY_SESSION", "Board", "Query", "TimelineSession"]

EVERY_SESSION = (1 << 63) - 1
"""The recording number with which a rank says that it will send no more events."""


class Query:
    """Questions to a rank; bits."""

    STATUS = 1
    DUMP = 2
    DUMP_IF_SET = 4
    TRACE = 8


class TimelineSession(NamedTuple):
    """A recording."""

    number: int  # number of the recording, from 1
    mark_cycles: bool  # whether executions are marked
    since_ns: int  # when it began
    begin: int  # the last entry of the log that does not belong to it
    end: int  # 0 while it is under way, then one more than the last entry of the log that belongs to it


class Board(Protocol):
    """Questions and answers of ranks beside the log, so also while the coordinator is stuck."""

    rank: int  # this rank

    def ask(self, rank: int, wanted: int) -> int:
        """Ask ``rank`` for something and return the number of the question."""

    def asked_by(self, rank: int) -> int:
        """Return the rank that waits for an answer of ``rank``, or -1."""

    def question(self) -> tuple[int, int, int] | None:
        """Return (number, wanted, asking rank) of a new question to this rank; None if there is none."""

    def give_answer(self, number: int, text: bytes) -> None:
        """Answer question ``number`` and all before it."""

    def answer(self, rank: int, number: int) -> bytes | None:
        """Return the answer of ``rank`` to question ``number``, or None while there is none."""

    def give_reason(self, text: bytes) -> None:
        """Publish why this rank fails or leaves; call this before ``Peers`` reports it."""

    def reason(self, rank: int) -> bytes | None:
        """Return why ``rank`` failed or left, or None if it did not say."""

    @property
    def session(self) -> TimelineSession:
        """The last recording."""

    def set_session(self, session: TimelineSession) -> None:
        """Begin or end a recording."""

    def finish_session(self, number: int) -> None:
        """Report that this rank has sent all events of recording ``number`` and of those before it."""

    def finished_session(self, rank: int) -> int:
        """Return the number of the last recording of which ``rank`` has sent all events."""

    def put_trace(self, data: bytes) -> bool:
        """Append to this rank's trace events; False when there is no room."""

    def take_trace(self, rank: int) -> bytes:
        """Return the trace events that ``rank`` appended since the last call."""

    def note_arrival(self, key: int, at_ns: int) -> None:
        """Publish when this rank submitted an operation; ``key`` is the same on all ranks, ``at_ns`` a time of this
        host's monotonic clock.
        """

    def arrival(self, rank: int, key: int) -> int:
        """Return the ``at_ns`` of ``note_arrival`` on ``rank``, or 0 if it is not known (any more)."""

    def close(self) -> None:
        """Release the resources of this process."""
