"""A job on paper that runs on several hosts: leaders gather, messages travel one by one, some hosts lag behind."""

from __future__ import annotations

import collections
import random
from collections.abc import Sequence

from paper import PaperJob

from horovod.core.coordinator import LogEntry
from horovod.core.gathering import Gathering, Message
from horovod.core.generation import Generation, Member
from horovod.core.hub import HubCoordinator
from horovod.core.requests import Request

__all__ = ["PaperHosts", "spread"]


def spread(counts: Sequence[int], rng: random.Random) -> list[list[int]]:
    """Ranks of hosts; launchers number them in any way."""
    ranks = iter([0, *rng.sample(range(1, sum(counts)), sum(counts) - 1)])
    return [[next(ranks) for _ in range(count)] for count in counts]


class _Way:
    """The way of one host's messages to the hub."""

    def __init__(self) -> None:
        self.waiting: collections.deque[Message] = collections.deque()
        self.sent: collections.Counter[type] = collections.Counter()

    def put(self, message: Message) -> None:
        self.waiting.append(message)
        self.sent[type(message)] += 1


class PaperHosts(PaperJob):
    """See the module.

    Args:
        hosts: ranks of each host.
        rng: decides what moves when.
        threshold: bytes that may be fused.
        capacity: responses that the coordinator remembers.
        signatures: requests that a rank remembers, those in flight aside.

    Attributes:
        sent: how often hosts sent what.
    """

    def __init__(
        self,
        hosts: Sequence[Sequence[int]],
        rng: random.Random,
        threshold: int = 128 << 20,
        capacity: int = 4096,
        signatures: int = 1024,
    ) -> None:
        size = sum(map(len, hosts))
        super().__init__(size, threshold, capacity, signatures)
        self.hub = HubCoordinator(Generation([Member(0, "paper")] * size, hosts=hosts), threshold, capacity)
        self.coordinator = self.hub
        self._hosts, self._rng = hosts, rng
        self._ways = [_Way() for _ in hosts]
        self._leaders = [Gathering(ranks, way.put) for ranks, way in zip(hosts, self._ways, strict=True)]
        self._leader_of = {rank: leader for leader, ranks in zip(self._leaders, hosts, strict=True) for rank in ranks}
        self._back: list[collections.deque[LogEntry]] = [collections.deque() for _ in hosts]

    @property
    def sent(self) -> collections.Counter[type]:
        return sum((way.sent for way in self._ways), collections.Counter())

    def leave(self, rank: int, reason: str) -> None:
        self._leader_of[rank].leave(rank, reason)

    def settle(self) -> list[LogEntry]:
        """Move something; everything if that was nothing. Return the log if a rank may go on."""
        if self._rng.random() < 0.7 and self.move():
            return self.log or [LogEntry(())]
        before = sum(len(me.executed) for me in self.ranks)
        self.settle_all()
        return self.log if sum(len(me.executed) for me in self.ranks) > before else []

    def settle_all(self) -> None:
        """Move everything, also what leaders keep, until nothing moves."""
        for _ in range(3):
            for leader in self._leaders:
                leader.collect_old()
            self.flow()
        assert not any(leader.is_holding for leader in self._leaders)

    def flow(self) -> None:
        """Move everything but what leaders keep, until nothing moves."""
        moved = True
        while moved:
            for leader in self._leaders:
                leader.collect()
            moved = sum(self._ask(host, 1 << 30) for host in self._order()) > 0
            moved |= self._decide()
            moved |= sum(self._bring(host, 1 << 30) for host in self._order()) > 0

    def move(self) -> bool:
        """Move a few messages; return whether there were any."""
        moved = False
        for host in self._order():
            if self._rng.random() < 0.5:
                self._leaders[host].collect()
            moved |= self._ask(host, self._rng.randrange(4))
            moved |= self._rng.random() < 0.3 and self._decide()
            moved |= self._bring(host, self._rng.randrange(4))
        return moved

    def assert_quiet(self) -> None:
        """Nothing is pending, on any rank, host, or at the coordinator."""
        self.settle_all()
        super().assert_quiet()
        assert not self.hub.is_waiting

    def _declare(self, rank: int, signature: int, wanted: Request) -> None:
        self._leader_of[rank].declare(rank, signature, wanted)

    def _submit(self, rank: int, signature: int, note: int) -> None:
        self._leader_of[rank].submit(rank, signature, note)

    def _order(self) -> list[int]:
        return self._rng.sample(range(len(self._hosts)), len(self._hosts))

    def _ask(self, host: int, most: int) -> bool:
        """Bring messages of a host to the hub."""
        waiting = self._ways[host].waiting
        count = min(most, len(waiting))
        for _ in range(count):
            self.hub.take_message(waiting.popleft())
        return count > 0

    def _decide(self) -> bool:
        log = self.hub.take()
        for back in self._back:
            back.extend(log)
        self.log += log
        return bool(log)

    def _bring(self, host: int, most: int) -> bool:
        """Bring the log and what belongs to it to a host, and let its ranks replay it."""
        back, leader = self._back[host], self._leaders[host]
        count = min(most, len(back))
        for _ in range(count):
            item = back.popleft()
            leader.observe([item])
            for rank in self._hosts[host]:
                self._replay(rank, item)
        return count > 0
