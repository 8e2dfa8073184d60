"""Who executes an entry: its members by host, and which of them speak with the other hosts.

Every host has as many *owners* as the smallest one has members; the i-th owners of all hosts are a group, which moves
the i-th slice of everything, so that all of a host's ranks, and network cards, work at once.
"""

from __future__ import annotations

from horovod.transports.base import Watch
from horovod.transports.groups import Group, Groups
from horovod.transports.hierarchical.stage import Memory, Stage

__all__ = ["Team"]


class Team:
    """See the module.

    Args:
        rank: this rank.
        hosts: the members on each host.
        stage: buffers of those on this one.
        scratch: memory of this rank alone, of which some rounds use a part each.
        groups: the engine between hosts.
        watch: asked while waiting.

    Attributes:
        here: this host's place among ``hosts``.
        me: this rank's place among the members on its host, and, if there are as many owners, among these.
        slots: how many owners each host has.
        is_owner: whether this rank is one.
    """

    def __init__(
        self, rank: int, hosts: tuple[tuple[int, ...], ...], stage: Stage, scratch: Memory, groups: Groups, watch: Watch
    ) -> None:  # fmt: skip
        self.rank = rank
        self.hosts = hosts
        self.stage = stage
        self.scratch = scratch
        self.here = next(index for index, host in enumerate(hosts) if rank in host)
        self.me = hosts[self.here].index(rank)
        self.slots = min(map(len, hosts))
        self.is_owner = self.me < self.slots
        self.watch = watch
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
