"""The ranks of a job on several hosts: the leaders exchange them, and each leader publishes them on its host."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence

import msgspec

from horovod.core.generation import Generation, Member
from horovod.errors import InitError, PeerLostError
from horovod.links.hosts.remote_ranks import RemoteRanks
from horovod.rendezvous.protocol import HostEntry, Refusal

__all__ = ["Roster", "await_roster", "ended"]

#: How much longer than the leader the other ranks of a host wait, so that its explanation arrives.
_GRACE_S = 5.0


class Roster(msgspec.Struct, array_like=True, frozen=True, tag="roster"):
    """The ranks of a job."""

    hosts: list[HostEntry]  # the hosts, rank 0's first
    index: int  # the host that receives this roster
    # endpoint at which that host has reached rank 0's host; on rank 0's host, one at which it was reached
    where: str = ""

    def generation(self, number: int) -> Generation:
        """Return the membership; ``number`` counts the meetings of the job."""
        members = {
            rank: Member(pid, host.hostname)
            for host in self.hosts
            for rank, pid in zip(host.ranks, host.pids, strict=True)
        }
        ranks = [host.ranks for host in self.hosts]
        return Generation([members[rank] for rank in range(len(members))], number=number, hosts=ranks)


def await_roster(remote: RemoteRanks, leader_fd: int, timeout_s: float, check: Callable[[], None]) -> Roster:
    """Return the ranks of the job, as the leader of this host publishes them.

    Raises:
        InitError: there is no job.
        PeerLostError: a rank has ended.
    """
    deadline = time.monotonic() + timeout_s + _GRACE_S

    def is_over() -> bool:
        check()
        return bool(ended([leader_fd])) or time.monotonic() > deadline

    text = remote.wait(is_over)
    if not text:
        if ended([leader_fd]):
            raise PeerLostError("the first rank of this host died inside init()", rank=-1)
        raise InitError(
            f"the first rank of this host did not meet the other hosts within {timeout_s:g} s (HOROVOD_START_TIMEOUT)"
        )
    found = msgspec.msgpack.decode(text, type=Roster | Refusal)
    if isinstance(found, Refusal):
        found.enforce()
    assert isinstance(found, Roster)
    return found


def ended(pid_fds: Sequence[int]) -> list[int]:
    """Return the indices of those processes that have ended."""
    poll = select.poll()
    for fd in pid_fds:
        poll.register(fd, select.POLLIN)
    found = {fd for fd, _ in poll.poll(0)}
    return [index for index, fd in enumerate(pid_fds) if fd in found]
