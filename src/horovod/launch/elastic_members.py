"""Processes of an elastic job: the slot and the rank of each, and the lines about those that end. Pure."""

from __future__ import annotations

from collections.abc import Callable

from horovod.core.membership_events import Assign, Slot
from horovod.launch.ledger import Ledger, Loss

__all__ = ["ElasticMembers"]


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
