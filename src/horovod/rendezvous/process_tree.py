"""Detects that a rank of the job has started this process: then it is not a rank, despite inherited variables.

A rank in the job maps the control page, whose name tells the job; a job whose ranks have met has no place for others.
The process table is searched upwards, since shells and fork servers may stand between a rank and its child.
Source: memfd_create(2), proc(5).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from horovod.launchers import LAUNCHERS
from horovod.world import World, process_status

__all__ = ["control_name", "is_no_rank", "rank_above"]


def control_name(job: str) -> str:
    """Return the name of the memfd that every rank of ``job`` maps from the meeting to ``shutdown()``."""
    job = job.partition("#")[0]  # ranks of a part of the job are ranks of the job, too
    return f"horovod-control-{hashlib.sha256(job.encode(errors='surrogatepass')).hexdigest()[:32]}"


def rank_above(job: str, proc: Path = Path("/proc"), pid: int | None = None) -> int:
    """Return the process id of the nearest ancestor, of this process unless told otherwise, that is a rank of ``job``,
    or 0.
    """
    mark = f"/memfd:{control_name(job)} ".encode()
    pid = os.getpid() if pid is None else pid
    try:
        while pid := int(process_status(proc, pid)[1]):
            if mark in (proc / str(pid) / "maps").read_bytes():
                return pid
    except (OSError, ValueError, IndexError):
        pass  # a process of another user is not a rank of ours, nor is any process above it
    return 0


def is_no_rank(world: World, parent: int = 0) -> str:
    """Return the error text for a process that a rank has started, or with 0 as ``parent``, forked."""
    origin = f"started by rank {world.rank} (pid {parent})" if parent else f"forked from rank {world.rank}"
    text = (
        f"this process was {origin} and is not a rank itself. Call init() and collectives only in the rank, and pass "
        "the values that this process needs, such as hvd.rank(), as arguments"
    )
    if not parent:
        return text
    # Under mpi4py alone, the variables of MPI's launcher define the ranks.
    row = next((row for row in LAUNCHERS if row.name == world.launcher), LAUNCHERS[1])
    *names, last = dict.fromkeys((row.rank, row.size, *row.sign))
    return (
        f'{text}. A script that its own workers import again must call init() below `if __name__ == "__main__":`. A '
        f"program of its own must be started without {', '.join(names)} and {last} in its environment"
    )
