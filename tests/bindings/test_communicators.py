"""mpi4py's communicators as jobs and as process sets, under real mpirun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import horovod.numpy as hvd
from horovod.bindings import communicators
from horovod.world import World

SCRIPT = """
import sys
import numpy as np
from mpi4py import MPI
import horovod.numpy as hvd

world = MPI.COMM_WORLD
rank, size = world.Get_rank(), world.Get_size()

def total(**how):
    return int(hvd.allreduce(np.full(1, 10**rank), op=hvd.Sum, **how)[0])

hvd.init(comm=world)
assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (rank, size, rank, size)
assert (hvd.cross_rank(), hvd.cross_size(), total()) == (0, 1, 111)
hvd.init(comm=world)  # changes nothing
hvd.shutdown()

# The halves of a split are jobs of their own at the same time, and their order is the communicator's.
half = world.Split(rank % 2, -rank)
hvd.init(comm=half)
assert (hvd.rank(), hvd.size(), total()) == (half.Get_rank(), half.Get_size(), [101, 10][rank % 2])
hvd.shutdown()

# As process sets: each rank names its own half, or none.
only = world.Split(0 if rank else MPI.UNDEFINED)
mine, some = hvd.ProcessSet(half), hvd.ProcessSet(only)
hvd.init(comm=world, process_sets=[mine, some])
assert mine.ranks == [[0, 2], [1]][rank % 2], mine
assert total(process_set=mine) == [101, 10][rank % 2]
assert rank == 0 or total(process_set=some) == 110
hvd.barrier()
hvd.shutdown()

if rank != 1:
    hvd.init(comm=[2, 0])
    assert (hvd.rank(), hvd.size(), total()) == ([1, None, 0][rank], 2, 101)
    try:
        hvd.init(comm=[0, 2])
    except ValueError as error:
        assert "call shutdown() first" in str(error)
    hvd.shutdown()
hvd.init(comm=MPI.COMM_SELF)
assert (hvd.size(), total()) == (1, 10**rank)
hvd.shutdown()

for wrong, said in (
    (MPI.COMM_NULL, "only the processes of a communicator"),
    ([0, 7], "must name ranks from 0 to 2"),
    ([(rank + 1) % 3], f"rank {rank} is not in comm="),
    (3, "a list of ranks or a communicator"),
):
    try:
        hvd.init(comm=wrong)
        raise AssertionError(wrong)
    except ValueError as error:
        assert said in str(error), error
assert not hvd.is_initialized()
try:
    hvd.init(comm=[0, 1, 2], process_sets=[hvd.ProcessSet(half)])
except NotImplementedError:
    print("ok", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.mpi(k)) for k in ("openmpi", "mpich")])
def test_communicators(kind: str, mpirun: list[str], tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    library = str(Path(mpirun[0]).parent.parent / "lib")
    done = subprocess.run(
        [*mpirun, "-n", "3", sys.executable, str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "LD_LIBRARY_PATH": library, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok") == 3, done.stdout + done.stderr


class _Alone:
    """mpi4py's MPI in a process that another launcher has started: its world has one process."""

    class Comm:
        def Get_size(self) -> int:
            return 1

    COMM_WORLD, COMM_SELF = Comm(), Comm()


def test_a_communicator_that_knows_one_rank_of_several_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under horovodrun, and with the mpirun of another MPI, each rank would train by itself without a word."""
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", _Alone)  # type: ignore[arg-type]
    monkeypatch.setattr(communicators, "detect", lambda: World(0, 2, 0, 2, 0, 1, "here", "horovodrun", "job", b"key"))
    with pytest.raises(ValueError, match=r"one process in each of the 2 ranks.* started by horovodrun"):
        hvd.init(comm=_Alone.COMM_WORLD)
    with pytest.raises(ValueError, match=r"call init\(\) without communicators"):
        hvd.init(process_sets=[hvd.ProcessSet(_Alone.Comm())])
    assert not hvd.is_initialized()
    communicators.check_start(_Alone.COMM_SELF)  # a job of one is meant
    monkeypatch.setattr(communicators, "detect", lambda: World(0, 1, 0, 1, 0, 1, "here", "none", "", b""))
    communicators.check_start(_Alone.COMM_WORLD)
