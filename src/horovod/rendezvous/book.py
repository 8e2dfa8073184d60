"""Who has come to a meeting of hosts, and what is answered: pure, so that it is tested with tables.

Each meeting of the job has its page. A leader that waits repeats itself; one that does not any more, because its host
is lost, is forgotten. When the hosts that wait have all ranks between them, each gets the roster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from horovod._version import __version__
from horovod.phrases import few, list_ranks
from horovod.rendezvous.offers import Answer, Come, Failed, Fate, Gone, HostOffer, Refusal, Roster, Waiting

__all__ = ["EXPIRY_S", "Book", "describe"]

EXPIRY_S = 5.0
"""How long who does not repeat itself is taken to be there."""
_Letters = list[tuple[bytes, Answer]]


@dataclass(frozen=True)
class _Guest:
    sender: bytes
    come: Come
    seen_at: float


@dataclass
class _Page:
    guests: list[_Guest] = field(default_factory=list)
    rosters: dict[bytes, Roster] = field(default_factory=dict)
    failure: Refusal | None = None
    untold: int = 0


class Book:
    """All meetings of a job.

    Args:
        hosts: name of the host of each rank, by rank; empty when that is not known.
    """

    def __init__(self, hosts: Sequence[str] = ()) -> None:
        self._hosts = hosts
        self._pages: dict[int, _Page] = {}
        self._ended: dict[int, tuple[str, str]] = {}

    def come(self, sender: bytes, come: Come, now: float) -> _Letters:
        """A leader wants to meet.

        Args:
            sender: how to answer it.
            come: what it says.
            now: the present time, in seconds.

        Returns:
            To whom to say what.
        """
        for number in [number for number in self._pages if number < come.number - 1]:
            del self._pages[number]
        page = self._pages.setdefault(come.number, _Page())
        if page.failure is not None:
            page.untold -= len(come.offer.ranks)
            return [(sender, page.failure)]
        if come.nonce in page.rosters:
            return [(sender, page.rosters[come.nonce])]  # it has not reached the leader
        page.rosters.clear()
        page.guests = [
            guest
            for guest in page.guests
            if guest.come.nonce != come.nonce
            and now - guest.seen_at <= EXPIRY_S
            and _process(guest.come.offer) != _process(come.offer)
        ]
        page.guests.append(_Guest(sender, come, now))
        page.guests.sort(key=lambda guest: guest.come.offer.ranks)
        if problem := _problem([guest.come for guest in page.guests]):
            return self._refuse(page, Refusal(problem))
        there = {rank for guest in page.guests for rank in guest.come.offer.ranks}
        if len(there) == come.size:
            return self._complete(page)
        missing = [rank for rank in range(come.size) if rank not in there]
        if dead := [rank for rank in missing if rank in self._ended]:
            return self._refuse(page, self._never_came(dead[0]))
        return [(sender, Waiting(self._words(missing)))]

    def gone(self, gone: Gone) -> _Letters:
        """A leader has given up; those who wait for it do the same.

        Args:
            gone: what it says.

        Returns:
            To whom to say what.
        """
        page = self._pages.get(gone.number, _Page())
        before = page.guests
        page.guests = [guest for guest in before if guest.come.nonce != gone.nonce]
        page.rosters.pop(gone.nonce, None)
        return self._refuse(page, Refusal(gone.error, gone.lost)) if len(page.guests) < len(before) else []

    def failed(self, sender: bytes, failed: Failed) -> _Letters:
        """The ranks of a host did not find each other; whoever waits for them, now or later, is told.

        Args:
            sender: how to answer that this is known now; empty for nobody.
            failed: what was said.

        Returns:
            To whom to say what.
        """
        page = self._pages.setdefault(failed.number, _Page())
        answers: _Letters = []
        if page.failure is None:
            page.failure = Refusal(failed.error, is_loss=failed.is_loss)
            page.untold = failed.size - failed.absent - sum(len(guest.come.offer.ranks) for guest in page.guests)
            answers = self._refuse(page, page.failure)
        return answers + ([(sender, page.failure)] if sender else [])

    @property
    def has_told(self) -> bool:
        """Whether a host has failed, and all others have heard of it."""
        return any(page.failure is not None and page.untold <= 0 for page in self._pages.values())

    @property
    def has_failed(self) -> bool:
        """Whether a host has failed."""
        return any(page.failure is not None for page in self._pages.values())

    def other_version(self, sender: bytes, version: str) -> _Letters:
        """A leader has another version of this package, and so there will be no job.

        Args:
            sender: how to answer it.
            version: what it has.

        Returns:
            To whom to say what.
        """
        waiting = [guest for page in self._pages.values() for guest in page.guests]
        names = " and ".join(sorted({guest.come.offer.hostname for guest in waiting})) or "the place where hosts meet"
        refusal = Refusal(
            f"a host of the job has khorovod {version}, and {names} {__version__}; install the same version on all"
        )
        told: _Letters = [(sender, refusal)]
        for page in self._pages.values():
            told += self._refuse(page, refusal)
        return told

    def ended(self, rank: int, who: str, how: str) -> _Letters:
        """A rank has ended; whoever waits for it, now or later, is told.

        Args:
            rank: of the job.
            who: the same in words.
            how: what became of it.

        Returns:
            To whom to say what.
        """
        self._ended.setdefault(rank, (who, how))
        told: _Letters = []
        for page in self._pages.values():
            if page.guests:
                told += self._refuse(page, self._never_came(rank))
        return told

    def fate(self, rank: int) -> Fate:
        """Return what became of a rank, as far as that is known."""
        return Fate(rank, self._ended.get(rank, ("", ""))[1])

    def _never_came(self, rank: int) -> Refusal:
        who, how = self._ended[rank]
        return Refusal(f"{who} {how} before its init() was done", lost=rank)

    def _refuse(self, page: _Page, refusal: Refusal) -> _Letters:
        told = [(guest.sender, refusal) for guest in page.guests]
        page.guests = []
        return list(told)

    def _complete(self, page: _Page) -> _Letters:
        offers = [guest.come.offer for guest in page.guests]
        control = next(guest.come.control for guest in page.guests if 0 in guest.come.offer.ranks)
        letters: _Letters = []
        for guest in page.guests:
            roster = Roster(guest.come.nonce, offers, control)
            page.rosters[guest.come.nonce] = roster
            letters.append((guest.sender, roster))
        page.guests = []
        return letters

    def _words(self, ranks: list[int]) -> str:
        if not self._hosts:
            return list_ranks(ranks)
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self._hosts[rank] if rank < len(self._hosts) else "(unknown)", []).append(rank)
        return "; ".join(f"{list_ranks(theirs)} of host {host}" for host, theirs in by_host.items())


def describe(offer: HostOffer) -> str:
    """Return who a host is: its name and its ranks."""
    return f"host {offer.hostname} with {list_ranks(offer.ranks)}"


def _process(offer: HostOffer) -> tuple[str, list[int], list[int]]:
    return offer.hostname, offer.ranks, offer.pids


def _problem(comes: Sequence[Come]) -> str:
    """Why these cannot be of one job; empty when they can."""
    first = comes[0]
    for come in comes[1:]:
        if come.size != first.size:
            return (
                f"{describe(come.offer)} is of a job of {come.size} ranks, and {describe(first.offer)} of one of "
                f"{first.size}; start all of them with one command"
            )
    return _overlap(comes) or _beyond(comes)


def _overlap(comes: Iterable[Come]) -> str:
    owner: dict[int, HostOffer] = {}
    for come in comes:
        for rank in come.offer.ranks:
            other = owner.setdefault(rank, come.offer)
            if other is not come.offer:
                mine, its = (f"{offer.hostname} ({few(offer.addresses)})" for offer in (come.offer, other))
                return (
                    f"there are two processes that are rank {rank}: on host {mine} and on host {its}; was the job "
                    f"started twice with one key, or on each host as if it were alone?"
                )
    return ""


def _beyond(comes: Iterable[Come]) -> str:
    for come in comes:
        if wrong := [rank for rank in come.offer.ranks if not 0 <= rank < come.size]:
            return f"{describe(come.offer)} has {list_ranks(wrong)}, and the job has a size of {come.size}"
    return ""
