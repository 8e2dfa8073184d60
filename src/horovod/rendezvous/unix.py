"""Lets the ranks of one host find each other: one meeting on an abstract unix socket, which is closed afterwards.

Rank 0 listens during init() under a name that only processes with the job's key can compute, and that changes every
second. The name is no file, so nothing is left behind in any case. Each rank first sends a greeting, signed with the
key, and its arena as a file descriptor. Rank 0 answers all of them at once, signed too, with the descriptors of all
ranks; the meeting is valid when all have confirmed that they received them. A peer of another user, or without the
key, gets no answer, and cannot prevent a meeting by binding names or holding connections open.

No replay protection is needed: no other process can read from a unix socket, and the kernel identifies the peer.
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
        world: this process's place in the job.
        arena_fd: this rank's arena.
        arena_bytes: its size in bytes.
        control_fd: the control page on rank 0, else -1.
        timeout_s: seconds to wait for the last rank.

    Raises:
        InitError: a rank did not come in time, or does not match the others; or this process has no descriptor left.
        PeerLostError: a rank has ended, before the meeting or in it.
        HorovodInternalError: ``world.meeting.check`` has cancelled the meeting.

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
