"""The link between two hosts is cut at random moments of a job: everybody goes on, or ends and says why."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from namespaces import Cluster

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys
def say(*words):
    print(*words, flush=True)
say("begins")
import numpy as np, horovod.numpy as hvd
say("loaded")
try:
    hvd.init()
    going = 2.0
    while going == 2.0:
        hvd.allreduce(np.ones(300_000), name="large")
        going = float(hvd.allreduce(np.full(1, 1.0 - os.path.exists(sys.argv[1])), op=hvd.Sum, name="small")[0])
        say("step")
    say("done")
except hvd.HorovodInternalError as error:
    say(f"{type(error).__name__}: {error}")
"""
TIMEOUT_S = 120.0
#: As srun would give to a task on each of two hosts, besides its number.
TASK = {
    "HOROVOD_SECRET_KEY": "ab" * 32, "OMP_NUM_THREADS": "1", "SLURM_JOB_ID": str(os.getpid()), "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "a,b",
}  # fmt: skip
LIMITS = {"HOROVOD_HOST_TIMEOUT": "4", "HOROVOD_START_TIMEOUT": "60", "HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}
#: At most so many lines of rank 0 come before the cut: in some runs it is in the middle of init().
_LINES = 12


@pytest.mark.parametrize("seed", [3, 7])
def test_a_cut_ends_a_job_with_an_error_that_names_a_host_or_not_at_all(
    seed: int, cluster: Cluster, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    before = {host: set(cluster.processes(host)) for host in "ab"}
    words = [sys.executable, "-c", SCRIPT, str(tmp_path / "stop")]
    ranks = []
    for rank, host in enumerate("ab"):
        with (tmp_path / str(rank)).open("w") as output:
            command = cluster.machines[host].command(*words)
            environ = {**os.environ, **TASK, **LIMITS, "SLURM_STEP_ID": str(seed)}
            environ |= {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)}
            ranks.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environ))
    try:
        _await_lines(tmp_path / "0", rng.randrange(1, _LINES), ranks[0])
        time.sleep(rng.random() / 4)
        cluster.cut("b")
        if rng.random() < 0.5:
            time.sleep(rng.random())
            cluster.mend("b")
            (tmp_path / "stop").touch()
        codes = [rank.wait(TIMEOUT_S) for rank in ranks]
    finally:
        cluster.mend("b")
        for process in ranks:
            process.kill()
            process.wait()
    texts = [(tmp_path / str(rank)).read_text() for rank in (0, 1)]
    assert codes == [0, 0], texts
    for text in texts:
        last = text.splitlines()[-1]
        assert last == "done" or (": " in last and "host" in last), texts
    left = {host: set(cluster.processes(host)) - before[host] for host in "ab"}
    assert left == {"a": set(), "b": set()}


def _await_lines(path: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    while len(path.read_text().splitlines()) < count and process.poll() is None:
        time.sleep(0.005)
