"""Elastic jobs without a launcher of ours: ``srun`` starts the ranks of a real Slurm, and those that are left go on."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from slurm import Slurm

# Adds 1 + ... + size in each step. Processes whose number or node is in ``deaths`` end themselves in that step,
# those in ``exits`` end with exit code 3, in step -1 before they have met the others; ``full`` is a
# step before which there must be so many ranks, and ``endless`` trains until it is asked to leave. With a ``folder``, a
# process that replaces a dead one begins when the others have come to that step.
TRAIN = """
import json, os, signal, sys, time
from pathlib import Path
import numpy as np
import horovod.numpy as hvd
plan = json.loads(sys.argv[1])
task = os.environ["SLURM_PROCID"] if not os.environ.get("HOROVOD_JOIN_STEP") else "new"
lost, alone = (Path(plan.get("folder", "/none"), name) for name in ("lost", "alone"))
while lost.exists() and not alone.exists():
    time.sleep(0.01)
hvd.init()
state = hvd.elastic.NumpyState(w=np.zeros(3))
print(f"task {task} of job {os.environ['SLURM_JOB_ID']}\\n", end="", flush=True)
if plan.get("exits", {}).get(task) == -1:
    sys.exit(3)

@hvd.elastic.step
def one_step(state):
    total = hvd.allreduce(np.full(3, hvd.rank() + 1.0), op=hvd.Sum, name="step")
    if state.progress in (plan["deaths"].get(task), plan["deaths"].get(os.environ["SLURMD_NODENAME"])):
        if "folder" in plan:
            lost.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if plan.get("exits", {}).get(task) == state.progress:
        sys.exit(3)
    state.w += hvd.allreduce(total, op=hvd.Average, name="average")

@hvd.elastic.run
def train(state):
    while state.progress < 20 or plan.get("endless"):
        while state.progress == plan.get("full", [-1])[0] and hvd.size() < plan["full"][1]:
            if "folder" in plan:
                alone.touch()
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
    assert re.search(r"^horovod: 2 losses and 0 joins by step 20, 2 resets", ended.stderr, re.M)


def test_tasks_that_exit_with_a_code_are_lost_and_srun_returns_it(slurm: Slurm, train: list[str]) -> None:
    plan = json.dumps({"deaths": {}, "exits": {"1": -1, "3": 5}})
    ended = slurm.run("srun", "-N2", "-w", "a,b", "-n4", *train, plan, check=False, HOROVOD_ELASTIC="1")
    total = float(5 * 6 + 15 * 3)
    assert results(ended.stdout) == [f"rank {rank} of 2, {rank} of 2: {[total] * 3}" for rank in (0, 1)], ended.stderr
    how = r"ended with SystemExit: 3 at \S+; 2 ranks continue at step 5, after \d"
    assert re.search(rf"^horovod: rank 2 \(pid \d+ on b\) {how}", ended.stderr, re.M), ended.stderr
    assert re.search(r"^horovod: 1 loss and 0 joins by step 20, 1 reset", ended.stderr, re.M), ended.stderr
    assert ended.returncode == 3


def test_the_ranks_of_other_nodes_go_on_when_a_node_is_lost(own_slurm: Slurm, train: list[str]) -> None:
    """As docs/clusters/slurm.md has it: Slurm would end the step, and the job, if it finds that the node is down."""
    words = ["srun", "-t", "5", "--no-kill", "--kill-on-bad-exit=0", "-N3", "-n3", *train]
    plan = json.dumps({"deaths": {}, "endless": True})
    with own_slurm.start(*words, plan, stderr=subprocess.STDOUT, HOROVOD_ELASTIC="1") as job:
        number = job_of(job, 6)  # each says so again in its first step
        own_slurm.crash("c")
        lost = next(line for line in job.stdout if "continue at step" in line)
        assert re.match(r"horovod: rank \d \(pid \d+ on c\) was lost with its host, .*; 2 ranks continue", lost), lost
        own_slurm.run("scontrol", "update", "NodeName=c", "State=DOWN", "Reason=crashed")
        assert any("Node failure on c" in line for line in job.stdout)
        own_slurm.run("scancel", "--signal=TERM", f"{number}.0")
        assert sorted(line for line in job.stdout if "leaves" in line) == ["task 0 leaves\n", "task 1 leaves\n"]


def test_the_loss_of_the_first_node_ends_the_job_and_names_its_service(own_slurm: Slurm, train: list[str]) -> None:
    plan = json.dumps({"deaths": {}, "endless": True})
    words = ["srun", "-t", "3", "-N3", "-n4", *train, plan]
    with own_slurm.start(*words, stderr=subprocess.STDOUT, HOROVOD_ELASTIC="1") as job:
        job_of(job, 8)  # each says so again in its first step
        own_slurm.crash("a")
        why = r"horovod\S+: the job service at tcp://(10\.77\.0\.2|\[fd77::2\]):\d+ has not answered for 10 s; has the"
        assert len(list(itertools.islice(filter(re.compile(why).match, job.stdout), 2))) == 2
        # Slurm would find out after SlurmdTimeout, and srun waits for it.
        own_slurm.run("scontrol", "update", "NodeName=a", "State=DOWN", "Reason=crashed")
        assert "srun: error: Node failure on a" in job.stdout.read()
    assert job.returncode


def job_of(job: subprocess.Popen[str], tasks: int) -> str:
    """The job's number, when all its tasks have called init()."""
    lines: list[str] = []
    while sum("of job" in line for line in lines) < tasks:
        lines.append(job.stdout.readline())
        assert lines[-1], lines
    return lines[-1].split()[-1]


def test_another_step_takes_the_place_of_a_lost_rank(slurm: Slurm, train: list[str]) -> None:
    """As docs/clusters/slurm.md has it: it may be there before."""
    plan = json.dumps({"deaths": {"1": 5}, "full": [8, 3]})
    with slurm.start("srun", "-t", "3", "-N2", "-w", "a,b", "-n3", *train, plan, HOROVOD_ELASTIC="1") as job:
        number = job_of(job, 3)
        words = ["srun", f"--jobid={number}", "--overlap", "-N1", "-n1", "-w", "b", *train, plan]
        added = slurm.run(*words, HOROVOD_ELASTIC="1", HOROVOD_JOIN_STEP="0")
        found = results(job.stdout.read() + added.stdout)
    lines = [line.partition(":")[0] for line in found]
    assert lines == ["rank 0 of 3, 0 of 1", "rank 1 of 3, 0 of 2", "rank 2 of 3, 1 of 2"]
    least, most = 5 * 6 + 3 * 3 + 12 * 6, 20 * 6  # nothing, or all that the others do alone meanwhile
    (total,) = {line.partition(":")[2] for line in found}
    values = json.loads(total)
    assert values == [values[0]] * 3 and least <= values[0] <= most


def test_horovodrun_replaces_a_lost_rank_in_an_allocation(slurm: Slurm, train: list[str], tmp_path: Path) -> None:
    plan = json.dumps({"deaths": {"b": 5}, "full": [8, 3], "folder": str(tmp_path)})
    words = ["-m", "horovod.launch.cli", "--min-np", "2", *train, plan]
    ended = slurm.run("salloc", "-N2", "-w", "a,b", "-n3", sys.executable, *words)
    found = sorted(line.partition(">:")[2] for line in ended.stdout.splitlines() if ">:rank " in line)
    total = f"{[5 * 6.0 + 3 * 3.0 + 12 * 6.0] * 3}"
    assert found == [f"rank {place}: {total}" for place in ("0 of 3, 0 of 2", "1 of 3, 1 of 2", "2 of 3, 0 of 1")]
    how = r"was killed by SIGKILL; 2 ranks continue at step 5, after \d"
    assert re.search(rf"^horovodrun: rank 2 \(pid \d+ on b:0\) {how}", ended.stderr, re.M), ended.stderr
    assert "rank 2 on b:0 joined; 3 ranks continue at step 8" in ended.stderr


def test_tasks_that_slurm_asks_to_end_leave_after_a_step(slurm: Slurm, train: list[str]) -> None:
    """``scancel`` sends the signal as ``--signal=TERM@60`` does, and at a moment when all of them train."""
    plan = json.dumps({"deaths": {}, "endless": True})
    with slurm.start("srun", "-t", "3", "-N2", "-n3", *train, plan, HOROVOD_ELASTIC="1") as job:
        number = job_of(job, 6)  # each says so again in its first step
        slurm.run("scancel", "--signal=TERM", f"{number}.0")
        left = sorted(line for line in job.stdout.read().splitlines() if "leaves" in line)
    assert left == [f"task {task} leaves" for task in range(3)]
    assert job.returncode == 0
