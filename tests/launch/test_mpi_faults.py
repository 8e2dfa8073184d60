"""Ranks that MPI started, of which one ends too early: the others hear of it, and nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import TIMEOUT_S

pytestmark = pytest.mark.slow

BOTH = [pytest.param(kind, marks=pytest.mark.mpi(kind)) for kind in ("openmpi", "mpich")]
KILLED = """
import os, signal, numpy as np, horovod.numpy as hvd
hvd.init()
for _ in range(5):
    hvd.allreduce(np.ones(30_000), name="x")
if hvd.rank() == 1:
    print("rank 1 is killed", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
hvd.allreduce(np.ones(30_000), name="never")
print("a rank went on", flush=True)
"""
GONE = """
import os, sys
if "1" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("RANK")):
    os._exit(0)
import horovod.numpy as hvd
from horovod.errors import PeerLostError
try:
    hvd.init()
except PeerLostError as error:
    print(f"PeerLostError: {error}", flush=True)
    sys.exit(3)
"""


def _run(*words: str, **environ: str) -> tuple[int, str]:
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, "OMP_NUM_THREADS": "1", **environ}
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("kind", BOTH)
def test_a_killed_rank_ends_a_job_whose_data_moves_over_mpi(kind: str, mpirun: list[str]) -> None:
    library = str(Path(mpirun[0]).parent.parent / "lib")
    code, said = _run(
        *mpirun, "-np", "3", sys.executable, "-c", KILLED, HOROVOD_CPU_OPERATIONS="MPI", LD_LIBRARY_PATH=library
    )
    assert code != 0
    assert "rank 1 is killed" in said
    assert "a rank went on" not in said


@pytest.mark.mpi("openmpi")
def test_a_rank_that_ended_before_init_is_not_waited_for(mpirun: list[str]) -> None:
    # A process that waits for so long is ended by this test.
    code, said = _run(*mpirun, "-np", "3", sys.executable, "-c", GONE, HOROVOD_START_TIMEOUT="500")
    assert code == 3, said
    assert said.count("PeerLostError: rank 1 ") == 2, said
    assert "before its init() was done" in said
