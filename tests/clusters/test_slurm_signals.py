"""Signals, preemption and requeue in a real Slurm: what docs/clusters/slurm.md promises, with its own job scripts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm import Slurm
from sources import ROOT

PAGE = (ROOT / "docs" / "clusters" / "slurm.md").read_text(encoding="utf-8")
#: The job scripts of the page: a job of a fixed size, and an elastic one that is requeued.
PLAIN, ELASTIC = re.findall(r"^```bash\n(#!/bin/bash\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
#: Adds 3 in each step. It trains without an end until the job has begun ``sys.argv[1]`` times, then 5 steps more.
TRAIN = """
import os, sys
import numpy as np
import horovod.numpy as hvd
hvd.init()
state = hvd.elastic.NumpyState(w=np.zeros(2))
begun = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
hvd.on_leave(lambda: print(f"left {begun} at {state.progress}\\n", end="", flush=True))

@hvd.elastic.step
def one_step(state):
    state.w += hvd.allreduce(np.full(2, 1.0), op=hvd.Sum, name="step")
    if state.progress == first:
        place = f"{hvd.size()} ranks of job {os.environ['SLURM_JOB_ID']}"
        print(f"begun {begun} at {first}, {place}\\n", end="", flush=True)

@hvd.elastic.run
def train(state):
    global first
    first = state.progress
    while begun < int(os.environ["TIMES"]) or state.progress < first + 5:
        one_step(state)

train(state)
print(f"done {begun} at {state.progress}: {state.w.tolist()}\\n", end="", flush=True)
"""


@pytest.fixture
def folder(slurm: Slurm, tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def with_python(**environ: str) -> dict[str, str]:
    """Variables with which ``python`` and ``horovodrun`` are those of this environment."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {"PATH": path + ":/usr/sbin:/sbin", **environ}


def submitted(slurm: Slurm, folder: Path, text: str, *words: str, **environ: str) -> str:
    """Submit a script of the page, with smaller tasks; return the number of the job."""
    script = folder / "job.sh"
    script.write_text(text)
    smaller = ["--ntasks-per-node=1", "--cpus-per-task=2", "--gpus-per-node=0", f"--chdir={folder}"]
    words = (*smaller, f"--output={folder / 'out'}", *words, str(script))
    return str(slurm.run("sbatch", "--parsable", *words, **with_python(**environ)).stdout.strip())


def awaited(slurm: Slurm, job: str, is_it: Callable[[dict[str, str]], bool] = lambda shown: False) -> dict[str, str]:
    """The job as scontrol shows it, as soon as it has a property or is over; Slurm decides when."""
    while True:
        said = slurm.run("scontrol", "--oneliner", "show", "job", job).stdout
        shown = dict(word.partition("=")[::2] for word in said.split())
        if is_it(shown) or shown["JobState"] not in ("PENDING", "RUNNING", "SIGNALING", "COMPLETING"):
            return shown


def lines_of(slurm: Slurm, folder: Path, job: str, start: str, count: int) -> list[str]:
    """Lines of the job's output that begin with a text, as soon as there are so many."""
    found: list[str] = []

    def are_there(shown: dict[str, str]) -> bool:
        text = (folder / "out").read_text() if (folder / "out").exists() else ""
        found[:] = [line for line in text.splitlines() if line.startswith(start)]
        return len(found) >= count

    shown = awaited(slurm, job, are_there)
    assert len(found) == count, f"{shown['JobState']}: {(folder / 'out').read_text()}"
    return found


def begin_soon(slurm: Slurm, job: str) -> None:
    """Let a requeued job begin: Slurm makes it wait for two minutes, and slurmd for a second after its end."""
    shown = awaited(slurm, job, lambda shown: shown["JobState"] == "PENDING" and shown["Reason"] == "BeginTime")
    assert shown["JobState"] == "PENDING", shown
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+3", "TimeLimit=9")


def test_the_job_script_of_the_page_repeats_cpus_per_task(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, horovod.numpy as hvd\nhvd.init()\n"
        "print(f'rank {hvd.rank()} of {hvd.size()}:', os.environ['OMP_NUM_THREADS'], os.environ['SLURM_CPUS_PER_TASK'])"
    )
    submitted(slurm, tmp_path, PLAIN, "--wait")
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["rank 0 of 2: 2 2", "rank 1 of 2: 2 2"]


def test_a_preempted_job_and_one_at_its_time_limit_go_on_after_requeue(slurm: Slurm, folder: Path) -> None:
    job = submitted(slurm, folder, ELASTIC, "--time=9", TIMES="2")
    lines_of(slurm, folder, job, "begun 0 ", 2)
    slurm.run("srun", "--partition=urgent", "-N3", "--exclusive", "true")
    first = lines_of(slurm, folder, job, "left 0 ", 2)
    begin_soon(slurm, job)
    again = lines_of(slurm, folder, job, "begun 1 ", 2)
    assert again == [f"begun 1 at {first[0].split()[-1]}, 2 ranks of job {job}"] * 2
    # Slurm sends --signal=TERM@120 at its next check. The ranks have one minute at least.
    minutes = int(awaited(slurm, job, lambda shown: True)["RunTime"].split(":")[1])
    slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 2}")
    second = lines_of(slurm, folder, job, "left 1 ", 2)
    begin_soon(slurm, job)
    shown = awaited(slurm, job)
    assert (shown["Restarts"], shown["ExitCode"]) == ("2", "0:0"), (folder / "out").read_text()
    steps = int(second[0].split()[-1])
    assert int(first[0].split()[-1]) < steps
    assert lines_of(slurm, folder, job, "done ", 2) == [f"done 2 at {steps + 5}: {[2.0 * (steps + 5)] * 2}"] * 2
    assert not list(folder.glob("state-*/*.state"))


def test_scancel_signals_ranks_of_srun_and_they_go_on_after_their_flight_recorder(slurm: Slurm, folder: Path) -> None:
    words = ["srun", "-t", "3", "-N2", "-n3", sys.executable, str(folder / "train.py")]
    with slurm.start(*words, TIMES="1", HOROVOD_FLIGHT_RECORDER_DIR=str(folder / "dump")) as job:
        slurm.run("scancel", "--signal=TERM", signalled(slurm, job, folder))
        assert any(line.startswith("left 0 ") for line in job.stdout)
    assert job.returncode == 128 + 15  # the highest: a rank that has noticed the end of another one has 1


def signalled(slurm: Slurm, job: subprocess.Popen[str], folder: Path) -> str:
    """Send SIGUSR1 to three ranks that have begun: all write their flight recorder. Return the number of their job."""
    begun = 0
    while begun < 3:
        line = job.stdout.readline()
        assert line, "ended too soon"
        begun += "begun 0 at 0, 3 ranks" in line
    number = line.split()[-1]
    slurm.run("scancel", "--signal=SIGUSR1", number)
    dumps: dict[str, Path] = {}
    while dumps.keys() != {"rank-0", "rank-1", "rank-2"}:
        assert job.poll() is None, f"SIGUSR1 has ended the job, after {list((folder / 'dump').glob('*'))}"
        dumps = {path.name[:6]: path for path in (folder / "dump").glob("rank-*.json")}
    assert all(json.loads(path.read_text()) for path in dumps.values())
    return number


def test_signals_to_the_agents_of_horovodrun_reach_its_ranks(slurm: Slurm, folder: Path) -> None:
    """An elastic job of all tasks of the allocation: SIGTERM lets all of them leave, and write their state."""
    flags = ["--min-np", "2", "--checkpoint-dir", str(folder / "state")]
    words = ["salloc", "-t", "3", "-N2", "-n3", "horovodrun", *flags, "python", str(folder / "train.py")]
    dump = str(folder / "dump")
    with slurm.start(*words, **with_python(TIMES="1", HOROVOD_FLIGHT_RECORDER_DIR=dump)) as job:
        slurm.run("scancel", "--signal=TERM", signalled(slurm, job, folder))
        left = [int(line.split()[-1]) for line in job.stdout if ">:left 0 at " in line]
    assert len(left) == 3
    # The signal reaches one node after the other, and two ranks may go on without the first.
    assert [path.name for path in (folder / "state").iterdir()] == [f"elastic-{max(left):012d}.state"]


def test_the_batch_shell_that_horovodrun_replaces_gets_its_signal(slurm: Slurm, folder: Path) -> None:
    """``scancel --batch`` sends the signal as ``--signal=B:TERM@120`` does."""
    (line,) = re.findall(r"`(exec horovodrun [^`]*)`", PAGE)
    job = submitted(
        slurm, folder, f"#!/bin/sh\n{line}\n", "-N2", TIMES="1", HOROVOD_CHECKPOINT_DIR=str(folder / "state")
    )
    lines_of(slurm, folder, job, "[0]<stdout>:begun 0 at 0, 2 ranks", 1)
    slurm.run("scancel", "--batch", "--signal=TERM", job)
    assert awaited(slurm, job)["ExitCode"] == "143:0"
    assert len(list((folder / "state").glob("elastic-*.state"))) == 1
