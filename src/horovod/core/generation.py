"""The members of a job between one ``init()`` and the next ``shutdown()``, and the data that depends on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horovod.core.process_sets import ProcessSetTable

__all__ = ["Generation", "Member", "MembershipView"]


class Member(NamedTuple):
    """The process behind a rank.

    Attributes:
        pid: its process id.
        host: the host that it runs on.
    """

    pid: int
    host: str


class MembershipView(NamedTuple):
    """The present generation of the job, the same on all its ranks.

    Attributes:
        number: number of the generation, from 1.
        behind: ranks whose progress and digest differ from those of rank 0, newcomers included; empty when there is
            nothing to copy.
        previous: by rank, its rank in the previous generation; -1 for newcomers.
    """

    number: int
    behind: tuple[int, ...]
    previous: tuple[int, ...]


class Generation:
    """The membership of a job, and the data that depends on it alone.

    Args:
        members: the processes, by rank.
        number: number of the job's meeting, from 1.
        hosts: the ranks of each host, in the order of their local ranks; all on one host when omitted.

    Attributes:
        size: number of ranks.
        sets: the process sets; they change by entries of the log only, so they are equal on all ranks.
    """

    def __init__(self, members: Sequence[Member], number: int = 1, hosts: Sequence[Sequence[int]] = ()) -> None:
        self.members = tuple(members)
        self.number = number
        self.size = len(self.members)
        self.hosts = tuple(map(tuple, hosts)) or (tuple(range(self.size)),)
        self.sets = ProcessSetTable(self.size)

    def host_of(self, rank: int) -> int:
        """Return the index in ``hosts`` of the host on which ``rank`` runs."""
        return next(index for index, ranks in enumerate(self.hosts) if rank in ranks)

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the host of ``rank``, itself included, in the order of their local ranks.

        The first one leads: it reads the requests of all of them, and writes their log.
        """
        return self.hosts[self.host_of(rank)]

    def describe(self, rank: int) -> str:
        """Return ``rank 1 (pid 4711 on host)``."""
        pid, host = self.members[rank]
        return f"rank {rank} (pid {pid} on {host})"
