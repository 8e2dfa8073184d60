"""Processes of an elastic job: the slot and rank of each, a line for each loss and join, a summary at the end. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from horovod.core.membership_events import Assign, Slot

__all__ = ["ElasticMembers", "Ledger", "Loss", "signature"]

_MOST_CAUSES = 20
_MOST_IN_VAIN = 4
_SIGNALS = 128  # exit codes above it are those of signals
PATIENCE_S = 5.0
"""A loss is reported after this time, even if it is not repaired yet."""


@dataclass
class Loss:
    """A process that has not ended well."""

    who: str  # the process, such as "rank 1 (pid 7 on a)"
    how: str  # how it ended
    generation: int  # the last generation that had begun
    code: int  # exit code of the launcher for this end
    error: str = ""  # signature of the exception that ended it, or empty
    progress: int | None = None  # steps that the others had completed by then; None until they report them
    is_new: bool = False  # whether it had replaced another one in that generation


def signature(lines: Sequence[str]) -> str:
    """Return places and type of the exception with which the last lines of standard error end; empty without one."""
    begins = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last):")]
    if not begins:
        return ""
    traceback = lines[begins[-1] :]
    places = [line.strip() for line in traceback if re.match(r'\s+File ".*", line \d+', line)]
    kinds = [found[1] for line in traceback[1:] if (found := re.match(r"([A-Za-z_][\w.]*)(:|$)", line))]
    return "\n".join([*places, kinds[0]]) if kinds else ""


@dataclass
class Ledger:
    """The changes of one job. All calls take times of one clock, in seconds."""

    size: int = 0
    generation: int = 0
    losses: int = 0
    joins: int = 0
    resets: int = 0
    lost_s: float = 0.0
    failures: list[Loss] = field(default_factory=list)
    result: str = ""  # of the latest change
    is_trained: bool = False  # the training has ended: losses are not repaired any more
    _began_s: float | None = None
    _changed_s: float | None = None
    _gone: list[str] = field(default_factory=list)
    _is_announced: bool = False

    def ended(self, now_s: float, text: str, failure: Loss | None) -> None:
        """Record the end of a member, in words; ``failure`` is the loss, if the end is one."""
        self.changing(now_s)
        self._gone.append(text)
        if failure is not None:
            self.count(failure)

    def count(self, failure: Loss) -> None:
        """Count a loss for which nobody waits, or not any more."""
        self.losses += 1
        self.failures.append(failure)

    def changing(self, now_s: float) -> None:
        """Record that the members stop for another generation."""
        if self._changed_s is None:
            self._changed_s = now_s

    def waiting(self, now_s: float, fewest: int) -> str:
        """Return a line about losses that are not repaired yet, once; empty when there is none."""
        due = self.due_at()
        if due is None or now_s < due:
            return ""
        self._is_announced = True
        return f"{'; '.join(self._gone)}; waiting until {fewest} or more can go on"

    def due_at(self) -> float | None:
        """Return when ``waiting`` will have a line; None for never."""
        is_open = bool(self._gone) and self._changed_s is not None and not self._is_announced
        return self._changed_s + PATIENCE_S if is_open and self._changed_s is not None else None

    def begin(self, now_s: float, generation: int, size: int, joined: Sequence[str], progress: int) -> list[str]:
        """Record that a generation begins, and return lines for the user. ``joined`` are its new members, in words;
        none counts in the first generation.
        """
        is_first = self._began_s is None
        took_s = 0.0 if self._changed_s is None else now_s - self._changed_s
        self.result = f"{_ranks(size)} at step {progress}, after {took_s:.2f} s"
        lines = [f"{text}; {self.result}" for text in self._gone]
        if is_first:
            self._began_s = now_s
        else:
            lines += [f"{who} joined; {self.result}" for who in joined]
            self.joins += len(joined)
            self.resets += 1
            self.lost_s += took_s
        for failure in self.failures:
            if failure.progress is None:
                failure.progress = progress
        self.size, self.generation, self.is_trained = size, generation, False
        self._changed_s, self._is_announced = None, False
        self._gone.clear()
        return lines

    def own_error(self) -> Loss | None:
        """Return the failure that shows an error of the script itself: a rank failed at the same place as a rank of an
        earlier generation, and no step was completed in between. None if there is none.
        """
        for i, failure in enumerate(self.failures):
            for other in self.failures[:i] if failure.error else ():
                is_same = (failure.error, failure.progress) == (other.error, other.progress)
                if is_same and failure.progress is not None and failure.generation != other.generation:
                    return failure
        return None

    def loss_in_vain(self) -> Loss | None:
        """Return the last loss, if several generations in turn have lost a process that was new, or ended by itself,
        and no step was completed in between; None otherwise.
        """
        known = [failure for failure in self.failures if failure.progress is not None]
        generations = set()
        for failure in reversed(known):
            if failure.progress != known[-1].progress or not (failure.is_new or 0 < failure.code < _SIGNALS):
                break
            generations.add(failure.generation)
        return known[-1] if len(generations) >= _MOST_IN_VAIN else None

    def summary(self, now_s: float, progress: int) -> str:
        """Return the last line about a job in which anything has changed; else an empty text."""
        if self._began_s is None or not (self.resets or self.failures):
            return ""
        total_s = max(now_s - self._began_s, 1e-9)
        waited_s = now_s - self._changed_s if self._changed_s is not None else 0.0
        lost_s = self.lost_s + waited_s  # for others that did not come
        goodput = max(0.0, 1 - lost_s / total_s)
        return (
            f"{_count(self.losses, 'loss', 'es')} and {_count(self.joins, 'join')} by step {progress}, "
            f"{_count(self.resets, 'reset')}, {lost_s:.2f} of {total_s:.1f} s lost, goodput {goodput:.1%}"
        )

    def causes(self) -> list[str]:
        """Return a line for each failure."""
        shown = [f"    {failure.who} {failure.how}" for failure in self.failures[-_MOST_CAUSES:]]
        more = len(self.failures) - len(shown)
        return ([f"    {more} more before"] if more else []) + shown


def _ranks(size: int) -> str:
    return f"{size} rank{'s' * (size != 1)} continue{'s' * (size == 1)}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"


class ElasticMembers:
    """The processes of one elastic job, as its launcher knows them; each has a number that no other one gets."""

    def __init__(self) -> None:
        self.ledger = Ledger()  # the losses and joins
        self.running: dict[Slot, int] = {}  # number of the process in each slot
        self.ranks: dict[int, int] = {}  # rank of each member of the generation that has begun
        self.latest: list[int] = []  # members of the latest assignment, by rank
        self.fenced: dict[int, str] = {}  # processes that were ordered to be killed, and why
        self.is_meeting = True  # whether the members of the next generation have not met yet
        self._last_ranks: dict[int, int] = {}  # of processes that were members before
        self._since: dict[int, int] = {}  # first generation of each member
        # Members that have left and not ended yet: their last generation, the steps by then, and a line's end.
        self._leavers: dict[int, tuple[int, int, str]] = {}
        self._ended_well: dict[int, str] = {}  # members since the last generation began, in words
        # the latest process of each slot: when the assignment is known here, it may have ended
        self._started: dict[Slot, int] = {}
        self._count = 0

    def start(self, slot: Slot, size: int) -> tuple[int, int, int]:
        """Return the number of a process that starts in a slot, and the rank and size that it has until it is a member;
        ``size`` is the number of ranks that the user wants at first.
        """
        process, self._count = self._count, self._count + 1
        self.running[slot] = self._started[slot] = process
        if running := self.ledger.size:  # a newcomer: never rank 0, which has the state
            size = max(2, running)
            return process, size - 1, size
        return process, min(process, size - 1), size

    def assigned(self, now_s: float, decision: Assign) -> None:
        """Take the members of the next generation; ``now_s`` is the time on the ledger's clock."""
        self.ledger.changing(now_s)
        self.is_meeting = True
        self.latest = [self._started[slot] for slot in decision.positions]

    def begun(self, now_s: float, generation: int, progress: int, describe: Callable[[int], str]) -> list[str]:
        """Return lines for the user about a generation whose members have met; ``progress`` is that of the furthest.
        ``describe`` says where a process is, such as "on a:1".
        """
        alive = set(self.running.values())
        joined = [p for p in self.latest if p not in self.ranks and p in alive] if self.ledger.size else []
        leavers = [p for p in self.ranks if p not in self.latest and p in alive]
        for process, who in self._ended_well.items():
            if process not in self.latest:
                loss = Loss(who, how := "left with exit code 0", self.ledger.generation, 0)
                self.ledger.ended(now_s, f"{who} {how}", loss)
        self._ended_well.clear()
        last = self.ledger.generation
        self._last_ranks |= self.ranks
        self.ranks = {process: rank for rank, process in enumerate(self.latest)}
        self._since = {process: self._since.get(process, generation) for process in self.latest}
        self.is_meeting = False
        names = [f"{self.name(process)} {describe(process)}" for process in joined]
        lines = self.ledger.begin(now_s, generation, len(self.latest), names, progress)
        for process in self.latest:
            self._leavers.pop(process, None)
        self._leavers |= dict.fromkeys(leavers, (last, progress, self.ledger.result))
        return lines

    def rank_of(self, process: int) -> int | None:
        """Return the current or last rank of a process; the provisional one before the first generation; else None."""
        return self.ranks.get(process, self._last_ranks.get(process, None if self.ledger.size else process))

    def name(self, process: int) -> str:
        """Return the current or last rank of a process, in words."""
        rank = self.ranks.get(process, self._last_ranks.get(process))
        return "a new process" if rank is None else f"rank {rank}"

    def was_member(self, process: int) -> bool:
        """Whether a process is or was a member of a generation that has begun."""
        return process in self.ranks or process in self._last_ranks

    def left(self, process: int, who: str) -> list[str]:
        """Return lines for the user about a process that ends with exit code 0, if it left before the others."""
        if process in self._leavers:
            return [f"{who} left; {self._leavers.pop(process)[2]}"]
        if self.was_member(process) and not self.ledger.is_trained:
            self._ended_well[process] = who
        return []

    def lost(self, now_s: float, process: int, who: str, how: str, code: int, error: str) -> list[str]:
        """Return lines for the user about a process that has not done its work. ``code`` is the exit code of the
        launcher for this end; 0 is not a failure unless it was a member. ``error`` is the signature of the exception
        that ended it, or empty.
        """
        is_new = 1 < self.ledger.generation == self._since.get(process)
        loss = Loss(who, how, self.ledger.generation, code, error, is_new=is_new)
        if process in self._leavers:  # the other members knew that it left, and have gone on
            loss.generation, loss.progress, result = self._leavers.pop(process)
            self.ledger.count(loss)
            return [f"{who} {how}; {result}"]
        if self.ledger.is_trained and self.was_member(process):
            self.ledger.count(loss)
            return [f"{who} {how}, after the training had ended"]
        if process in self.ranks or process in self.latest:
            self.ledger.ended(now_s, f"{who} {how}", loss)
            return []
        self.ledger.failures += [loss] if code else []
        return [f"{who} {how}, before it was a member"]

    def script_error(self) -> str:
        """Return a message if other ranks would fail, too, as when the script itself fails; else empty."""
        if (failure := self.ledger.own_error()) is not None:
            return (
                f"{failure.who} {failure.how}, as another did before, at the same place: the script itself fails, "
                "and other ranks would fail, too"
            )
        if (failure := self.ledger.loss_in_vain()) is not None:
            since = f"no step was completed since step {failure.progress}"
            return f"{failure.who} {failure.how}, as others before it, and {since}"
        return ""
