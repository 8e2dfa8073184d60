"""How the ranks of one host find each other: one meeting on an abstract unix socket, then it is gone.

Rank 0 listens for as long as init() lasts, under a name that only those can compute who have the job's key, and that
changes every second. The name is no file, so nothing is left behind whatever happens. Each rank speaks first: a
greeting, signed with the key, and its arena as a file descriptor. Rank 0 answers all of them at once, signed too, with
everybody's descriptors; the meeting counts when all have said that they received them. A peer of another user, or
without the key, gets no answer, and what it binds or holds open keeps nobody from meeting.

No replay protection is needed: nobody can listen in on a unix socket, and the kernel names the peer.
Source: unix(7), SO_PEERCRED and SCM_RIGHTS; pidfd_open(2).
"""

from __future__ import annotations

import os
import time
from contextlib import closing

from horovod import _version
from horovod.rendezvous.endings import Endings
from horovod.rendezvous.limits import explained
from horovod.rendezvous.messages import Greeting, HostMeeting
from horovod.rendezvous.other_ranks import attend
from horovod.rendezvous.rank_zero import RankZero
from horovod.world import World

__all__ = ["meet"]


def meet(world: World, arena_fd: int, arena_bytes: int, control_fd: int, timeout_s: float) -> HostMeeting:
    """Meet the other ranks of this host.

    Args:
        world: who this process is.
        arena_fd: this rank's arena.
        arena_bytes: its size in bytes.
        control_fd: the control page on rank 0, else -1.
        timeout_s: seconds to wait for the last rank.

    Raises:
        InitError: a rank did not come in time, or does not fit to the others; or this process has no descriptor left.
        PeerLostError: a rank has ended, before the meeting or in it.
        HorovodInternalError: ``world.meeting.check`` has called it off.

    Blocks until all ranks are here, or ``timeout_s``.
    """
    hello = Greeting(world.rank, world.size, world.hostname, os.getpid(), _version.__version__, arena_bytes)
    deadline = time.monotonic() + timeout_s
    with explained(world.size), closing(Endings(world)) as endings:
        if world.rank == 0:
            with closing(RankZero(world, hello, arena_fd, control_fd, endings)) as host:
                meeting = host.gather(deadline, timeout_s)
        else:
            meeting = attend(world, hello, arena_fd, endings, deadline, timeout_s)
        endings.met(meeting.pids)
    return meeting
