"""The activity of another rank in words, from its own answer and from the kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from horovod.core.generation import Generation
from horovod.core.mismatch import describe_waiting
from horovod.core.requests import Request
from horovod.core.stall import BREAK_CIRCLE, Waiting, circle, who_waits_for_whom
from horovod.engine.board import Query
from horovod.engine.ports import Peers
from horovod.observe.queries import PATIENCE_S, Queries, RankStatus
from horovod.phrases import list_ranks

__all__ = ["StatusReports"]

_INDENT = "    "
_CANNOT_ANSWER = "TtZX"


class StatusReports:
    """Asks ranks for their status, and reports it. ``name`` describes a rank."""

    def __init__(self, queries: Queries, generation: Generation, peers: Peers) -> None:
        self._queries, self._process = queries, peers.process
        self._members, self.name = generation.members, generation.describe
        self._at_first: dict[int, tuple[str, float]] = {}

    def ask(self, ranks: Iterable[int], wanted: int = Query.STATUS) -> None:
        """Ask these ranks for their status."""
        asked = list(ranks)
        self._at_first = {rank: self._process(rank) for rank in asked}
        self._queries.ask(asked, wanted)

    def is_complete(self, ranks: Sequence[int]) -> bool:
        """Whether each of these ranks has answered, or will not answer any more."""
        answered = self._queries.answers(ranks)
        return all(
            rank in answered or self._queries.waited_s(rank) > PATIENCE_S or self._process(rank)[0] in _CANNOT_ANSWER
            for rank in ranks
        )

    def asker_of(self, rank: int) -> int:
        """Return the rank that waits for an answer of ``rank``, or -1."""
        return self._queries.board.asked_by(rank)

    def statuses(self, ranks: Sequence[int]) -> dict[int, RankStatus]:
        """Return the answers of those of ``ranks`` that have answered."""
        return self._queries.answers(ranks)

    def tell(self, missing: Sequence[int], others: Sequence[int], waiting: Sequence[Waiting]) -> list[str]:
        """Return lines about the missing ranks: their activity, and whether they wait for ranks that wait for them."""
        statuses = self._queries.answers([*missing, *others])
        blocked = {
            rank: status.blocked.request
            for rank, status in statuses.items()
            if status.blocked and not status.blocked.executing
        }
        waits = who_waits_for_whom(waiting, blocked)
        lines = []
        for rank in missing:
            lines += self._tell(rank, statuses.get(rank), waits.get(rank))
        return lines + _circle(waits, blocked)

    def _tell(self, rank: int, status: RankStatus | None, waits: Waiting | None) -> list[str]:
        who, pid = self.name(rank), self._members[rank].pid
        state, cpu_s = self._process(rank)
        if state in "ZX":
            return [f"{who} is dead"]
        if state in "Tt" and status is None:
            by = "a debugger" if state == "t" else f"a signal (SIGSTOP, or Ctrl-Z); `kill -CONT {pid}` wakes it"
            return [f"{who} is stopped by {by}"]
        if status is None:
            waited_s = self._queries.waited_s(rank)
            before, before_s = self._at_first.get(rank, ("?", 0.0))
            used_s = cpu_s - before_s if before != "?" else 0.0
            return [
                f"{who} does not answer: it is alive, but its engine thread cannot run. It used {used_s:.1f} s of "
                f"processor time in the last {waited_s:.1f} s.",
                f"{_INDENT}Code that keeps Python's global lock (GIL) for itself does that, such as a long call into "
                f"an extension; `py-spy dump --native --pid {pid}` shows where it is.",
            ]
        stack = [_INDENT + line for line in status.stack]
        if status.failure:
            return [f"{who} has failed: {status.failure.splitlines()[0]}; its main thread:", *stack]
        if status.blocked is None:
            doing = {"R": "is busy with other code", "D": "waits for a disk or a network file system"}
            return [f"{who} {doing.get(state, 'is alive, asleep in other code')}; its main thread:", *stack]
        return [f"{who} {_blocked(status, waits)}; its main thread:", *stack]


def _blocked(status: RankStatus, waits: Waiting | None) -> str:
    blocked = status.blocked
    assert blocked is not None
    request, for_s = blocked.request, blocked.waited_s
    what = describe_waiting(request, blocked.times)
    if request.process_set:
        what += f" of process set {request.process_set} (ranks {list(blocked.members)})"
    if blocked.executing:
        return f"is in the middle of {what}"
    text = f"waits itself, for {for_s:.1f} s, in {what}"
    return f"{text}, which {list_ranks(waits.missing)} did not submit" if waits else text


def _circle(waits: Mapping[int, Waiting], blocked: Mapping[int, Request]) -> list[str]:
    ranks = circle(waits)
    if not ranks:
        return []
    links = [
        f"rank {rank} in {describe_waiting(blocked[rank])} for rank {other}"
        for rank, other in zip(ranks, [*ranks[1:], ranks[0]], strict=True)
    ]
    return [
        f"They wait for each other, and will for ever: {'; '.join(links)}.",
        f"{_INDENT}{BREAK_CIRCLE}",
    ]
