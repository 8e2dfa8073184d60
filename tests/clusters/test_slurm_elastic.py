"""Elastic jobs without a launcher of ours: ``srun`` starts the ranks of a real Slurm, and those that are left go on."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from slurm import Slurm

# Adds 1 + ... + size in each step. Processes whose number is in ``deaths`` end themselves in that step; ``full`` is a
# step before which there must be so many ranks, and ``endless`` trains until it is asked to leave.
TRAIN = """
import json, os, signal, sys, time
import numpy as np
import horovod.numpy as hvd
plan = json.loads(sys.argv[1])
task = os.environ["SLURM_PROCID"] if not os.environ.get("HOROVOD_JOIN_STEP") else "new"
hvd.init()
state = hvd.elastic.NumpyState(w=np.zeros(3))
print(f"task {task} of job {os.environ['SLURM_JOB_ID']}\\n", end="", flush=True)

@hvd.elastic.step
def one_step(state):
    total = hvd.allreduce(np.full(3, hvd.rank() + 1.0), op=hvd.Sum, name="step")
    if plan["deaths"].get(task) == state.progress:
        os.kill(os.getpid(), signal.SIGKILL)
    state.w += hvd.allreduce(total, op=hvd.Average, name="average")

@hvd.elastic.run
def train(state):
    while state.progress < 20 or plan.get("endless"):
        while state.progress == plan.get("full", [-1])[0] and hvd.size() < plan["full"][1]:
            state.check_host_updates()
            time.sleep(0.01)
        one_step(state)
        if plan.get("endless") and state.progress == 1:
            print(f"task {task} of job {os.environ['SLURM_JOB_ID']}\\n", end="", flush=True)

hvd.on_leave(lambda: print(f"task {task} leaves\\n", end="", flush=True))
train(state)
place = f"{hvd.local_rank()} of {hvd.local_size()}"
print(f"rank {hvd.rank()} of {hvd.size()}, {place}: {state.w.tolist()}\\n", end="", flush=True)
"""


@pytest.fixture
def train(slurm: Slurm) -> list[str]:
    path = slurm.folder / "elastic.py"
    path.write_text(TRAIN)
    return [sys.executable, str(path)]


def results(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if line.startswith("rank "))


def test_the_ranks_that_srun_leaves_go_on(slurm: Slurm, train: list[str]) -> None:
    """A whole host of ranks is lost, then rank 0, on the host of the job service."""
    plan = json.dumps({"deaths": {"2": 5, "0": 8}})
    ended = slurm.run("srun", "-N3", "-n4", *train, plan, check=False, HOROVOD_ELASTIC="1")
    total = float(5 * 10 + 3 * 6 + 12 * 3)
    assert results(ended.stdout) == [
        f"rank 0 of 2, 0 of 1: {[total] * 3}",
        f"rank 1 of 2, 0 of 1: {[total] * 3}",
    ], ended.stdout + ended.stderr
    how = r"was killed by a signal, or has crashed"
    assert re.search(
        rf"^horovod: rank 2 \(pid \d+ on b\) {how}; 3 ranks continue at step 5, after \d", ended.stderr, re.M
    )
    assert re.search(
        rf"^horovod: rank 0 \(pid \d+ on a\) {how}; 2 ranks continue at step 8, after \d", ended.stderr, re.M
    )
    assert re.search(r"^horovod: 2 losses and 0 joins by step 8, 2 resets", ended.stderr, re.M)


def job_of(job: subprocess.Popen[str], tasks: int) -> str:
    """The job's number, when all its tasks have called init()."""
    assert job.stdout is not None
    lines: list[str] = []
    while sum("of job" in line for line in lines) < tasks:
        lines.append(job.stdout.readline())
        assert lines[-1], lines
    return lines[-1].split()[-1]


def test_another_step_takes_the_place_of_a_lost_rank(slurm: Slurm, train: list[str]) -> None:
    """As docs/clusters/slurm.md has it: it may be there before."""
    plan = json.dumps({"deaths": {"1": 5}, "full": [8, 3]})
    with slurm.start("srun", "-t", "3", "-N2", "-n3", *train, plan, HOROVOD_ELASTIC="1") as job:
        number = job_of(job, 3)
        words = ["srun", f"--jobid={number}", "--overlap", "-N1", "-n1", "-w", "b", *train, plan]
        added = slurm.run(*words, HOROVOD_ELASTIC="1", HOROVOD_JOIN_STEP="0")
        assert job.stdout is not None
        found = results(job.stdout.read() + added.stdout)
    lines = [line.partition(":")[0] for line in found]
    assert lines == ["rank 0 of 3, 0 of 1", "rank 1 of 3, 0 of 2", "rank 2 of 3, 1 of 2"]
    least, most = 5 * 6 + 3 * 3 + 12 * 6, 20 * 6  # nothing, or all that the others do alone meanwhile
    (total,) = {line.partition(":")[2] for line in found}
    values = json.loads(total)
    assert values == [values[0]] * 3 and least <= values[0] <= most


def test_tasks_that_slurm_asks_to_end_leave_after_a_step(slurm: Slurm, train: list[str]) -> None:
    """``scancel`` sends the signal as ``--signal=TERM@60`` does, and at a moment when all of them train."""
    plan = json.dumps({"deaths": {}, "endless": True})
    with slurm.start("srun", "-t", "3", "-N2", "-n3", *train, plan, HOROVOD_ELASTIC="1") as job:
        number = job_of(job, 6)  # each says so again in its first step
        slurm.run("scancel", "--signal=TERM", f"{number}.0")
        assert job.stdout is not None
        left = sorted(line for line in job.stdout.read().splitlines() if "leaves" in line)
    assert left == [f"task {task} leaves" for task in range(3)]
    assert job.returncode == 0
