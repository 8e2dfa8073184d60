"""The members of an entry by host, and the owners among them that exchange data with other hosts.

Every host has as many *owners* as the smallest one has members; the i-th owners of all hosts are a group, which moves
the i-th slice of everything, so that all of a host's ranks, and network cards, work at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from horovod.transports.groups import Group, Groups
from horovod.transports.hierarchical.stage import Memory, Stage

__all__ = ["Team"]

_Step = Callable[[int], None]


class Team:
    """See the module. ``hosts`` are the members on each host. Some rounds use a part of ``scratch`` each, memory of
    this rank alone. ``arenas``, if there are any, are memory of the members on this host that all of them map.
    """

    def __init__(
        self, rank: int, hosts: tuple[tuple[int, ...], ...], stage: Stage, scratch: Memory, groups: Groups,
        arenas: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        self.rank = rank
        self.hosts = hosts
        self.stage = stage
        self.scratch = scratch
        self.here = next(index for index, host in enumerate(hosts) if rank in host)  # this host's place among `hosts`
        # this rank's place among the members on its host; an owner has the same place among the owners
        self.me = hosts[self.here].index(rank)
        self.slots = min(map(len, hosts))  # how many owners each host has
        self.is_owner = self.me < self.slots
        self.is_pair_of_ranks = [len(host) for host in hosts] == [1, 1]
        self.arenas = arenas
        self._groups = groups

    @property
    def local(self) -> tuple[int, ...]:
        """The members on this host."""
        return self.hosts[self.here]

    def owners(self) -> Group:
        """Return the group of this owner."""
        return self._groups.group([host[self.me] for host in self.hosts])

    def everybody(self) -> Group:
        """Return the group of all members, in their order."""
        return self._groups.group(sorted(rank for host in self.hosts for rank in host))

    def pipeline(self, count: int, fill: _Step, send: _Step, receive: _Step, collect: _Step) -> None:
        """Take every round through four steps; steps of neighbouring rounds overlap.

        Args:
            count: number of rounds.
            fill: puts this rank's data into the buffers of its host.
            send: at an owner, once all ranks of its host have filled: begins to move its slice.
            receive: at an owner: waits for the data of the other hosts, and puts it into the buffers.
            collect: once all owners of its host have received: takes the data that this rank needs.
        """
        stage = self.stage
        base = stage.part()
        for k in range(count + 2):
            if k < count:
                fill(k)
            stage.post(base + 2 * k + 1)
            if self.is_owner:
                if k < count:
                    stage.wait(base + 2 * k + 1)
                    send(k)
                if 1 <= k <= count:
                    receive(k - 1)
            stage.post(base + 2 * k + 2)
            if k >= 2:
                stage.wait(base + 2 * k)
                collect(k - 2)
