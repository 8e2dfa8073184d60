"""The coordinator's half of the numbers: what each stands for, and which hosts have submitted it; see ``gathering``.

A number that may have become wrong is retired: from then on its submissions count one by one, each as what its
signature stands for. It is free again when all hosts have said that they use it no more.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import TypeAlias

import msgspec

from horovod.core.coordinator import CachedResponse
from horovod.core.generation import Generation
from horovod.core.tally import Tally, indices

__all__ = ["News", "Number", "Numbered", "Numbers", "Retire"]

#: Numbers in use, at most; one takes a bit of each message.
_MOST = 1 << 15


class Number(msgspec.Struct, frozen=True):
    """To one host: from now on ``number`` stands for submissions of ``members``, pairs of a rank and a signature."""

    number: int
    members: tuple[tuple[int, int], ...]


class Retire(msgspec.Struct, frozen=True):
    """To one host: from now on ``number`` stands for nothing."""

    number: int


News: TypeAlias = Number | Retire


@dataclass(frozen=True, eq=False, slots=True)
class Numbered:
    """The meaning of a number.

    Attributes:
        number: the number.
        match: process set and name.
        known: the response.
        ranks: by host, ranks and their signatures.
        serials: of the requests behind the signatures.
        users: hosts that may still use it.
    """

    number: int
    match: Hashable
    known: CachedResponse
    ranks: Mapping[int, tuple[tuple[int, int], ...]]
    serials: tuple[int, ...]
    users: set[int] = field(default_factory=set)

    @property
    def bit(self) -> int:
        """Its place in a message."""
        return 1 << self.number


class Numbers:
    """See the module.

    Args:
        generation: who takes part.
        submit: takes a single submission: a rank and a signature.
        capacity: how many to hand out at most.
    """

    def __init__(self, generation: Generation, submit: Callable[[int, int], None], capacity: int) -> None:
        self._host_of = {rank: host for host, ranks in enumerate(generation.hosts) for rank in ranks}
        self._submit = submit
        self._capacity = min(capacity, _MOST)
        self._hosts = Tally(range(len(generation.hosts)))
        self._ranks = [Tally(ranks) for ranks in generation.hosts]
        self._used: dict[int, Numbered] = {}
        self._by_match: dict[Hashable, Numbered] = {}
        self._by_serial: dict[int, Numbered] = {}
        self._free: list[int] = []
        self._of_host = [0] * len(generation.hosts)
        # Whether, and through single ranks of which hosts, something may have become complete.
        self._is_touched = False
        self._touched: set[int] = set()
        self._latest: dict[Hashable, int] = {}
        self._news: dict[int, list[News]] = {}
        # Numbers of which each submission counts by itself: their names wait for single ranks, or they are retired.
        self._single = self._retired = 0
        self._is_paused = False

    # -- submissions ---------------------------------------------------------------------------------------------

    def add_rank(self, rank: int, bits: int) -> None:
        """Take submissions of a rank; those that stand for nothing are ignored."""
        host = self._host_of[rank]
        if bits := self._count_singly(host, bits, lambda other: other == rank):
            self._ranks[host].bits[rank] |= bits
            self._touched.add(host)
            self._is_touched = True

    def add_host(self, leader: int, bits: int) -> None:
        """Take submissions of all ranks of a host."""
        host = self._host_of[leader]
        if bits := self._count_singly(host, bits, lambda rank: True):
            self._hosts.bits[host] |= bits
            self._is_touched = True

    def _count_singly(self, host: int, bits: int, takes: Callable[[int], bool]) -> int:
        """Submit, for the ranks of a host that ``takes`` says, what counts one by one; return what is left of it."""
        bits &= self._of_host[host]
        single = bits & self._counted_singly()
        for numbered in self._all(single):
            self._submit_of(numbered, host, takes)
        return bits & ~single

    def take_complete(self) -> list[CachedResponse]:
        """Return what all ranks have submitted since the last call, in the order of the numbers."""
        if not self._is_touched:
            return []
        self._is_touched = False
        for host in self._touched:
            self._hosts.bits[host] |= self._ranks[host].take_complete()
        self._touched.clear()
        used = self._used
        return [used[number].known for number in indices(self._hosts.take_complete())]

    def open(self, match: Hashable) -> None:
        """Let the submissions of a name count one by one, those that are there already, too."""
        numbered = self._by_match.get(match)
        if numbered is not None and not self._single & numbered.bit:
            self._single |= numbered.bit
            self._spread(numbered)

    def close(self, match: Hashable) -> None:
        """End that: what was submitted under this name has been answered."""
        numbered = self._by_match.get(match)
        if numbered is not None:
            self._single &= ~numbered.bit

    def pause(self) -> None:
        """Let all submissions count one by one."""
        self._is_paused = True
        for numbered in self._all(self._outstanding()):
            self.open(numbered.match)

    def resume(self) -> None:
        """End that."""
        self._is_paused = False

    def waiting(self) -> Iterable[tuple[Hashable, int, list[int]]]:
        """Return what was submitted by some ranks: name, serial of a request, ranks that submitted it."""
        for numbered in self._all(self._outstanding()):
            present = [rank for host in numbered.ranks for rank, _ in self._submitters(numbered, host)]
            yield numbered.match, numbered.serials[0], sorted(present)

    def __bool__(self) -> bool:
        return bool(self._hosts) or any(self._ranks)

    # -- what they stand for -------------------------------------------------------------------------------------

    def note_run(self, known: CachedResponse, signatures: Sequence[tuple[int, int, int]]) -> None:
        """Take note of a response that came about by single submissions; the second time in a row it gets a number.

        Args:
            known: the response.
            signatures: of its members: rank, signature, serial of the request.
        """
        match = known.match
        if self._latest.get(match) != known.id:
            self._latest[match] = known.id
            return
        old = self._by_match.get(match)
        if old is not None and old.known is known:
            return
        if old is not None:
            self._retire(old)
        if not self._free and len(self._used) >= self._capacity:
            return
        number = heapq.heappop(self._free) if self._free else len(self._used)
        ranks: dict[int, tuple[tuple[int, int], ...]] = {}
        for rank, signature, _ in signatures:
            host = self._host_of[rank]
            ranks[host] = (*ranks.get(host, ()), (rank, signature))
        serials = tuple(serial for _, _, serial in signatures)
        numbered = Numbered(number, match, known, ranks, serials, set(ranks))
        self._used[number] = self._by_match[match] = numbered
        self._by_serial.update(dict.fromkeys(serials, numbered))
        self._hosts.enrol(numbered.bit, tuple(ranks))
        for host, members in ranks.items():
            self._ranks[host].enrol(numbered.bit, [rank for rank, _ in members])
            self._of_host[host] |= numbered.bit
            self._news.setdefault(host, []).append(Number(number, members))

    def forget(self, known: CachedResponse) -> None:
        """Note that a response has lost its id."""
        if self._latest.get(known.match) == known.id:
            del self._latest[known.match]
        numbered = self._by_match.get(known.match)
        if numbered is not None and numbered.known is known:
            self._retire(numbered)

    def redeclare(self, serial: int) -> None:
        """Note that a signature is going to stand for another request."""
        numbered = self._by_serial.get(serial)
        if numbered is not None:
            self._retire(numbered)

    def forget_set(self, process_set: int) -> None:
        """Note that a process set is removed."""
        for numbered in list(self._by_match.values()):
            if isinstance(numbered.match, tuple) and numbered.match[0] == process_set:
                self._retire(numbered)

    def free(self, leader: int, number: int) -> None:
        """Note that a host uses a number no more that was retired."""
        host, numbered = self._host_of[leader], self._used.get(number)
        if numbered is None or not self._retired & numbered.bit:
            return
        numbered.users.discard(host)
        if numbered.users:
            return
        self._retired &= ~numbered.bit
        self._hosts.strike(numbered.bit, tuple(numbered.ranks))
        for other, members in numbered.ranks.items():
            self._ranks[other].strike(numbered.bit, [rank for rank, _ in members])
            self._of_host[other] &= ~numbered.bit
        del self._used[number]
        heapq.heappush(self._free, number)

    def take_news(self) -> dict[int, list[News]]:
        """Return what hosts must be told of numbers."""
        news, self._news = self._news, {}
        return news

    def _retire(self, numbered: Numbered) -> None:
        self.open(numbered.match)
        del self._by_match[numbered.match]
        self._single &= ~numbered.bit
        self._retired |= numbered.bit
        for serial in numbered.serials:
            self._by_serial.pop(serial, None)
        for host in numbered.ranks:
            self._news.setdefault(host, []).append(Retire(numbered.number))

    # -- one by one ----------------------------------------------------------------------------------------------

    def _counted_singly(self) -> int:
        return -1 if self._is_paused else self._single | self._retired

    def _all(self, bits: int) -> list[Numbered]:
        return [self._used[number] for number in indices(bits)]

    def _outstanding(self) -> int:
        return reduce(
            or_, [*self._hosts.bits.values(), *(bits for tally in self._ranks for bits in tally.bits.values())]
        )

    def _submitters(self, numbered: Numbered, host: int) -> list[tuple[int, int]]:
        bit, ranks = numbered.bit, self._ranks[host].bits
        if self._hosts.bits[host] & bit:
            return list(numbered.ranks[host])
        return [(rank, signature) for rank, signature in numbered.ranks[host] if ranks[rank] & bit]

    def _spread(self, numbered: Numbered) -> None:
        """Let what was submitted by number count one by one."""
        singles = [single for host in numbered.ranks for single in self._submitters(numbered, host)]
        self._hosts.remove(numbered.bit, numbered.ranks)
        for host, members in numbered.ranks.items():
            self._ranks[host].remove(numbered.bit, [rank for rank, _ in members])
        for rank, signature in singles:
            self._submit(rank, signature)

    def _submit_of(self, numbered: Numbered, host: int, is_meant: Callable[[int], bool]) -> None:
        for rank, signature in numbered.ranks[host]:
            if is_meant(rank):
                self._submit(rank, signature)
