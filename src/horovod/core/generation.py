"""The members of a job between one ``init()`` and the next ``shutdown()``, and the data that depends on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from horovod.core.process_sets import ProcessSetTable
from horovod.launchers import cross_place
from horovod.world import World

__all__ = ["Generation", "Member", "MembershipView"]


class Member(NamedTuple):
    """The process behind a rank."""

    pid: int
    host: str  # the host that it runs on


class MembershipView(NamedTuple):
    """The present generation of the job, the same on all its ranks."""

    number: int  # number of the generation, from 1
    # ranks whose progress and digest differ from those of rank 0, newcomers included; empty when there is nothing to
    # copy
    behind: tuple[int, ...]
    previous: tuple[int, ...]  # by rank, its rank in the previous generation; -1 for newcomers


class Generation:
    """The membership of a job, and the data that depends on it alone. Members are by rank, and the ranks of each host
    in the order of their local ranks; without ``hosts`` all are on one. ``number`` is that of the job's meeting, from
    1.
    """

    def __init__(self, members: Sequence[Member], number: int = 1, hosts: Sequence[Sequence[int]] = ()) -> None:
        self.members = tuple(members)
        self.number = number
        self.size = len(self.members)  # number of ranks
        self.hosts = tuple(map(tuple, hosts)) or (tuple(range(self.size)),)
        # the process sets; they change by entries of the log only, so they are equal on all ranks
        self.sets = ProcessSetTable(self.size)

    def host_of(self, rank: int) -> int:
        """Return the index in ``hosts`` of the host on which ``rank`` runs."""
        return next(index for index, ranks in enumerate(self.hosts) if rank in ranks)

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the host of ``rank``, itself included, in the order of their local ranks.

        The first one leads: it reads the requests of all of them, and writes their log.
        """
        return self.hosts[self.host_of(rank)]

    def placed(self, world: World) -> World:
        """Return the place of a process, with the hosts that the ranks have found; a launcher may not know them all."""
        host = self.host_of(world.rank)
        local_rank = self.hosts[host].index(world.rank)
        cross_rank, cross_size = cross_place([*map(len, self.hosts)], host, local_rank)
        return replace(world, cross_rank=cross_rank, cross_size=cross_size)

    def describe(self, rank: int) -> str:
        """Return ``rank 1 (pid 4711 on host)``."""
        pid, host = self.members[rank]
        return f"rank {rank} (pid {pid} on {host})"
