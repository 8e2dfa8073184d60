"""Processes of an elastic job: the slot and the rank of each, and the lines about those that end. Pure."""

from __future__ import annotations

from collections.abc import Callable

from horovod.core.membership_events import Assign, Slot
from horovod.launch.ledger import Ledger, Loss

__all__ = ["ElasticMembers"]


class ElasticMembers:
    """The processes of one elastic job, as its launcher knows them. Each process has a number that no other one gets.

    Attributes:
        ledger: the losses and joins.
        running: number of the process in each slot.
        ranks: rank of each member of the generation that has begun.
        latest: members of the latest assignment, by rank.
        fenced: processes that were ordered to be killed, and why.
        is_meeting: whether the members of the next generation have not met yet.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.running: dict[Slot, int] = {}
        self.ranks: dict[int, int] = {}
        self.latest: list[int] = []
        self.fenced: dict[int, str] = {}
        self.is_meeting = True
        self._last_ranks: dict[int, int] = {}  # of processes that were members before
        self._since: dict[int, int] = {}  # first generation of each member
        # Members that have left and not ended yet: their last generation, the steps by then, and a line's end.
        self._leavers: dict[int, tuple[int, int, str]] = {}
        self._count = 0

    def start(self, slot: Slot, size: int) -> tuple[int, int, int]:
        """Return the number of a process that starts in a slot, and the rank and size that it has until it is a member.

        Args:
            slot: where it starts.
            size: number of ranks that the user wants at first.
        """
        process, self._count = self._count, self._count + 1
        self.running[slot] = process
        if running := self.ledger.size:  # a newcomer: never rank 0, which has the state
            size = max(2, running)
            return process, size - 1, size
        return process, min(process, size - 1), size

    def assigned(self, now_s: float, decision: Assign) -> None:
        """Take the members of the next generation.

        Args:
            now_s: when, by the clock of the ledger.
            decision: the assignment, which names them.
        """
        self.ledger.changing(now_s)
        self.is_meeting = True
        self.latest = [self.running.get(slot, -1) for slot in decision.positions]

    def begun(self, now_s: float, generation: int, progress: int, describe: Callable[[int], str]) -> list[str]:
        """Return lines for the user about a generation whose members have met.

        Args:
            now_s: when, by the clock of the ledger.
            generation: its number.
            progress: number of steps that the furthest member has completed.
            describe: says where a process is, such as "on a:1".
        """
        alive = set(self.running.values())
        joined = [p for p in self.latest if p not in self.ranks and p in alive] if self.ledger.size else []
        leavers = [p for p in self.ranks if p not in self.latest and p in alive]
        last = self.ledger.generation
        self._last_ranks |= self.ranks
        self.ranks = {process: rank for rank, process in enumerate(self.latest)}
        self._since = {process: self._since.get(process, generation) for process in self.latest}
        self.is_meeting = False
        names = [f"{self.name(process)} {describe(process)}" for process in joined]
        lines = self.ledger.begin(now_s, generation, len(self.latest), names, progress)
        self._leavers |= dict.fromkeys(leavers, (last, progress, self.ledger.result))
        return lines

    def name(self, process: int) -> str:
        """Return the current or last rank of a process, in words."""
        rank = self.ranks.get(process, self._last_ranks.get(process))
        return "a new process" if rank is None else f"rank {rank}"

    def was_member(self, process: int) -> bool:
        """Whether a process is or was a member of a generation that has begun."""
        return process in self.ranks or process in self._last_ranks

    def left(self, process: int, who: str) -> list[str]:
        """Return lines for the user about a process that has done its work, if it left before the others."""
        return [f"{who} left; {self._leavers.pop(process)[2]}"] if process in self._leavers else []

    def lost(self, now_s: float, process: int, who: str, how: str, code: int, error: str) -> list[str]:
        """Return lines for the user about a process that has not done its work.

        Args:
            now_s: when, by the clock of the ledger.
            process: its number.
            who: the process, in words.
            how: how it ended, in words.
            code: exit code of the launcher for this end; 0 is no failure unless it was a member.
            error: signature of the exception that ended it, or empty.
        """
        is_new = 1 < self.ledger.generation == self._since.get(process)
        loss = Loss(who, how, self.ledger.generation, code, error, is_new=is_new)
        if process in self._leavers:  # the other members knew that it left, and have gone on
            loss.generation, loss.progress, result = self._leavers.pop(process)
            self.ledger.losses += 1
            self.ledger.failures.append(loss)
            return [f"{who} {how}; {result}"]
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
            return f"{failure.who} {failure.how}, as the processes before it that joined at step {failure.progress}"
        return ""
