"""The hosts of a job, and the ranks on each host. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Topology"]


@dataclass(frozen=True)
class Topology:
    """The hosts of a job."""

    rank: int  # this rank
    hosts: tuple[tuple[int, ...], ...]  # the ranks of each host, ascending; hosts by their lowest rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.hosts))

    @property
    def mine(self) -> tuple[int, ...]:
        """The ranks of this rank's host."""
        return next(host for host in self.hosts if self.rank in host)

    def flat(self) -> Topology:
        """Return the topology in which each rank has a host of its own."""
        return Topology(self.rank, tuple((rank,) for rank in sorted(rank for host in self.hosts for rank in host)))

    def hosts_of(self, members: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the hosts of some ranks, ascending, with these ranks alone, by their lowest rank."""
        of_host = {rank: index for index, host in enumerate(self.hosts) for rank in host}
        found: dict[int, list[int]] = {}
        for rank in members:
            found.setdefault(of_host[rank], []).append(rank)
        return tuple(map(tuple, found.values()))
