"""How a job went, and how each of its ranks ended."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Exit", "Outcome"]


@dataclass(frozen=True)
class Exit:
    """How one rank ended.

    Attributes:
        rank: the rank.
        pid: its process id.
        status: exit code, or minus the signal that killed it.
        sent: the last signal that we had sent to it by then; 0 for none.
        has_begun: whether it had called ``hvd.init()``.
        how: how it ended, in words; empty if ``status`` says it.
    """

    rank: int
    pid: int
    status: int
    sent: int = 0
    has_begun: bool = True
    how: str = ""


@dataclass
class Outcome:
    """How the job went.

    Attributes:
        exits: in the order in which ranks ended.
        interrupted: signal that ended the launcher; 0 for none.
        tails: last lines of standard error, by rank.
        error: an error of the launcher itself, or the loss of a host before any rank failed.
        lost: host of each rank whose end is unknown.
        excused: ranks that failed because a host was lost.
        lines: report of an elastic job.
        code: exit code of the launcher after an elastic job.
    """

    exits: list[Exit] = field(default_factory=list)
    interrupted: int = 0
    tails: dict[int, list[str]] = field(default_factory=dict)
    error: str = ""
    lost: dict[int, str] = field(default_factory=dict)
    excused: set[int] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    code: int = 0

    @property
    def first_failure(self) -> Exit | None:
        """The first rank that failed by itself: we had sent it no signal, and no lost host excuses it."""
        return next((e for e in self.exits if e.status != 0 and not e.sent and e.rank not in self.excused), None)
