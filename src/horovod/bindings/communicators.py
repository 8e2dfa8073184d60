"""Use mpi4py communicators as jobs and process sets if the script has loaded mpi4py; this module never imports it."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from typing import Any

from horovod.world import World, detect

__all__ = ["all_sets", "check_start", "is_communicator", "ranks_in", "world_of"]


def is_communicator(value: Any) -> bool:
    """Return whether ``value`` is a communicator of mpi4py."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and isinstance(value, mpi.Comm)


def check_start(comm: Any) -> None:
    """Refuse communicators if MPI did not start the job: each rank's MPI then has one process only. MPI.COMM_SELF is
    always a job of one rank.

    Raises:
        ValueError: MPI's world has one process, but the job has more.
    """
    mpi = sys.modules["mpi4py.MPI"]
    if mpi.COMM_WORLD.Get_size() > 1 or comm == mpi.COMM_SELF:
        return
    world = detect()
    if world.size > 1:
        raise ValueError(
            f"MPI.COMM_WORLD has one process in each of the {world.size} ranks of this job: they were started by "
            f"{world.launcher}, and not by mpi4py's MPI; call init() without communicators, or start the job with the "
            "mpirun of that MPI"
        )


def world_of(comm: Any) -> World:
    """Return this process's place in the job that a communicator's processes form.

    Rank 0 draws the job's name and key at random and sends them over MPI.

    Raises:
        ValueError: another kind of communicator, or one without this process.

    Blocks until all processes of ``comm`` called.
    """
    mpi = sys.modules["mpi4py.MPI"]
    if comm == mpi.COMM_NULL:
        raise ValueError("init(comm=MPI.COMM_NULL): only the processes of a communicator can form a job of it")
    if comm.Is_inter():
        raise ValueError("init(comm=...) takes an intracommunicator; comm.Merge() makes one")
    rank, size = comm.Get_rank(), comm.Get_size()
    here = os.uname().nodename
    if size == 1:
        return World(0, 1, 0, 1, 0, 1, here, "mpi4py", "", b"")
    job, key = comm.bcast(("mpi4py-" + secrets.token_hex(16), secrets.token_bytes(32)) if rank == 0 else None)
    hosts = comm.allgather(here)
    local_ranks = [other for other, host in enumerate(hosts) if host == here]
    local_rank = local_ranks.index(rank)
    peers = [host for host in dict.fromkeys(hosts) if hosts.count(host) > local_rank]
    return World(
        rank, size, local_rank, len(local_ranks), peers.index(here), len(peers), here, "mpi4py", job, key
    )  # fmt: skip


def ranks_in(comm: Any, base: Any) -> list[int]:
    """Return the ranks that the processes of ``comm`` have in ``base``, or in MPI.COMM_WORLD, ascending.

    Raises:
        ValueError: a process of ``comm`` is not in ``base``.
    """
    mpi = sys.modules["mpi4py.MPI"]
    if comm == mpi.COMM_NULL:
        return []
    own, whole = comm.Get_group(), (base or mpi.COMM_WORLD).Get_group()
    ranks = sorted(mpi.Group.Translate_ranks(own, list(range(own.Get_size())), whole))
    own.Free()
    whole.Free()
    if mpi.UNDEFINED in ranks:
        raise ValueError("a communicator of process_sets= has processes that are not in the job")
    return ranks


def all_sets(ranks: Sequence[Sequence[int]], base: Any) -> list[list[int]]:
    """Return the process sets that any process of ``base``, or of MPI.COMM_WORLD, names, each once, in the same order
    on every process.

    Blocks until all processes called.
    """
    gathered = (base or sys.modules["mpi4py.MPI"].COMM_WORLD).allgather([list(each) for each in ranks])
    return [list(each) for each in dict.fromkeys(tuple(each) for sets in gathered for each in sets if each)]
