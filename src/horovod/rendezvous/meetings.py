"""Decides when all hosts of a job are here, and how each leader is answered. Pure.

A waiting leader repeats its ``Join``; one that stops repeating, because its host is lost, is dropped. When the
waiting hosts together have all ranks of the job, each gets the list of members.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from horovod._version import __version__
from horovod.phrases import few, list_ranks
from horovod.rendezvous.protocol import AllHere, Answers, Failed, Fate, GiveUp, HostEntry, Join, Refusal, StillMissing

__all__ = ["EXPIRY_S", "Meetings", "describe"]

EXPIRY_S = 5.0
"""Time for which a leader counts as waiting after its last ``Join``."""


@dataclass(frozen=True)
class _Leader:
    sender: bytes
    join: Join
    seen_at: float


@dataclass
class _Meeting:
    """One meeting."""

    leaders: list[_Leader] = field(default_factory=list)  # the waiting leaders
    # answers to the leaders of a complete meeting, by nonce: all are here, or one has given up since
    answers: dict[bytes, AllHere | Refusal] = field(default_factory=dict)
    failure: Refusal | None = None  # why a host will not come; kept until all other hosts know it
    told: set[int] = field(default_factory=set)  # ranks that know the failure
    reachable: int = 0  # number of ranks that can learn of it


class Meetings:
    """The meetings of a job's hosts, one for each generation; ``hosts`` has the host of each rank, if known."""

    def __init__(self, hosts: Sequence[str] = ()) -> None:
        self._hosts = hosts
        self._meetings: dict[tuple[str, int], _Meeting] = {}
        self._ended: dict[int, tuple[str, str]] = {}

    def join(self, sender: bytes, join: Join, now: float) -> Answers:
        """Handle a leader that wants to join; ``sender`` is the address for the answer."""
        for key in [
            (run, number) for run, number in self._meetings if run == join.run and number < join.generation - 1
        ]:
            del self._meetings[key]
        meeting = self._meetings.setdefault((join.run, join.generation), _Meeting())
        if meeting.failure is not None and not meeting.told.issuperset(join.entry.ranks):
            return self._tell(meeting, meeting.failure, [_Leader(sender, join, now)])
        if join.nonce in meeting.answers:  # the answer was lost, or a leader cannot reach another one
            return [(sender, self._never_came(join, range(join.size)) or meeting.answers[join.nonce])]
        meeting.answers.clear()
        meeting.leaders = [
            leader
            for leader in meeting.leaders
            if leader.join.nonce != join.nonce
            and now - leader.seen_at <= EXPIRY_S
            and _process(leader.join.entry) != _process(join.entry)
        ]
        meeting.leaders.append(_Leader(sender, join, now))
        meeting.leaders.sort(key=lambda leader: leader.join.entry.ranks)
        if problem := _problem([leader.join for leader in meeting.leaders]):
            return self._refuse(meeting, Refusal(problem))
        there = {rank for leader in meeting.leaders for rank in leader.join.entry.ranks}
        if len(there) == join.size:
            return self._complete(meeting)
        missing = [rank for rank in range(join.size) if rank not in there]
        if refusal := self._never_came(join, missing):
            return self._refuse(meeting, refusal)
        return [(sender, StillMissing(self._words(missing)))]

    def leave(self, leave: GiveUp) -> Answers:
        """Handle a leader that gives up; the leaders that wait for it give up, too."""
        meeting = self._meetings.get((leave.run, leave.generation), _Meeting())
        before = meeting.leaders
        meeting.leaders = [leader for leader in before if leader.join.nonce != leave.nonce]
        if meeting.answers.pop(leave.nonce, None) is not None:
            meeting.answers = dict.fromkeys(meeting.answers, leave.refusal)
        return self._refuse(meeting, leave.refusal) if len(meeting.leaders) < len(before) else []

    def failed(self, sender: bytes, failed: Failed) -> Answers:
        """Handle a host whose ranks did not find each other: refuse all leaders that wait, now or later."""
        meeting = self._meetings.setdefault((failed.run, failed.generation), _Meeting())
        if meeting.failure is None:
            meeting.failure, meeting.told, meeting.reachable = failed.refusal, set(), failed.size - failed.absent
        leaders, meeting.leaders = meeting.leaders, []
        return [*self._tell(meeting, failed.refusal, leaders), (sender, failed.refusal)]

    @property
    def has_to_tell(self) -> bool:
        """Whether a host has failed, and not all others know it yet."""
        return any(meeting.failure is not None for meeting in self._meetings.values())

    def other_version(self, sender: bytes, version: str) -> Answers:
        """Handle a leader with another version of this package: there will be no job."""
        waiting = [leader for meeting in self._meetings.values() for leader in meeting.leaders]
        names = " and ".join(sorted({leader.join.entry.hostname for leader in waiting})) or "the job service"
        refusal = Refusal(
            f"a host of the job has khorovod {version}, and {names} {__version__}; install the same version on all"
        )
        told: Answers = [(sender, refusal)]
        for meeting in self._meetings.values():
            told += self._refuse(meeting, refusal)
        return told

    def ended(self, rank: int, who: str, how: str) -> Answers:
        """Handle the end of a rank: refuse all leaders that wait for it, now or later."""
        self._ended.setdefault(rank, (who, how))
        told: Answers = []
        for meeting in self._meetings.values():
            join = meeting.leaders[0].join if meeting.leaders else None
            if join is not None and (refusal := self._never_came(join, range(join.size))):
                told += self._refuse(meeting, refusal)
        return told

    def fate(self, rank: int) -> Fate:
        """Return how a rank ended, as far as that is known."""
        return Fate(rank, self._ended.get(rank, ("", ""))[1])

    def _never_came(self, join: Join, ranks: Iterable[int]) -> Refusal | None:
        """Return why one of these ranks cannot come any more; None when nothing is known."""
        for rank in ranks:
            if end := self._ended.get(join.members[rank] if join.members else rank):
                return Refusal(f"{end[0]} {end[1]} before its init() was done", lost=rank)
        return None

    def _refuse(self, meeting: _Meeting, refusal: Refusal) -> Answers:
        told = [(leader.sender, refusal) for leader in meeting.leaders]
        meeting.leaders = []
        return list(told)

    def _tell(self, meeting: _Meeting, refusal: Refusal, leaders: Iterable[_Leader]) -> Answers:
        """Refuse leaders because of a failed host; when all know of it, another attempt may begin."""
        told: Answers = []
        for leader in leaders:
            meeting.told.update(leader.join.entry.ranks)
            told.append((leader.sender, refusal))
        if len(meeting.told) >= meeting.reachable:
            meeting.failure = None
        return told

    def _complete(self, meeting: _Meeting) -> Answers:
        entries = [leader.join.entry for leader in meeting.leaders]
        control = next(leader.join.control for leader in meeting.leaders if 0 in leader.join.entry.ranks)
        answers: Answers = []
        for leader in meeting.leaders:
            members = AllHere(leader.join.nonce, entries, control)
            meeting.answers[leader.join.nonce] = members
            answers.append((leader.sender, members))
        meeting.leaders = []
        return answers

    def _words(self, ranks: list[int]) -> str:
        if not self._hosts:
            return list_ranks(ranks)
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self._hosts[rank] if rank < len(self._hosts) else "(unknown)", []).append(rank)
        return "; ".join(f"{list_ranks(theirs)} of host {host}" for host, theirs in by_host.items())


def describe(entry: HostEntry) -> str:
    """Return a description of a host: its name and its ranks."""
    return f"host {entry.hostname} with {list_ranks(entry.ranks)}"


def _process(entry: HostEntry) -> tuple[str, list[int], list[int]]:
    return entry.hostname, entry.ranks, entry.pids


def _problem(joins: Sequence[Join]) -> str:
    """Return why these leaders cannot belong to one job; empty when they can."""
    first = joins[0]
    for join in joins[1:]:
        if join.size != first.size:
            return (
                f"{describe(join.entry)} is of a job of {join.size} ranks, and {describe(first.entry)} of one of "
                f"{first.size}; start all of them with one command"
            )
    return _overlap(joins) or _beyond(joins)


def _overlap(joins: Iterable[Join]) -> str:
    owner: dict[int, HostEntry] = {}
    for join in joins:
        for rank in join.entry.ranks:
            other = owner.setdefault(rank, join.entry)
            if other is not join.entry:
                mine, its = (f"{entry.hostname} ({few(entry.addresses)})" for entry in (join.entry, other))
                return (
                    f"there are two processes that are rank {rank}: on host {mine} and on host {its}; was the job "
                    f"started twice with one key, or on each host as if it were alone?"
                )
    return ""


def _beyond(joins: Iterable[Join]) -> str:
    for join in joins:
        if wrong := [rank for rank in join.entry.ranks if not 0 <= rank < join.size]:
            return f"{describe(join.entry)} has {list_ranks(wrong)}, and the job has a size of {join.size}"
    return ""
