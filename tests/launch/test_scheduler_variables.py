"""Launchers that cannot be had here: real ranks with the variables that their manuals document find each other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import TIMEOUT_S, horovodrun
from sources import ROOT

from horovod.errors import InitError
from horovod.launch.allocation import find_allocation
from horovod.world import detect

PAGES = ROOT / "docs" / "clusters"
TRAIN = """
import horovod.numpy as hvd
import numpy as np
hvd.init()
total = hvd.allreduce(np.arange(3.0) + hvd.rank(), op=hvd.Sum)
place = f"{hvd.local_rank()} of {hvd.local_size()}"
print(f"rank {hvd.rank()} of {hvd.size()}, {place}: {total.tolist()}\\n", end="", flush=True)
"""
EXPECTED = [f"rank {rank} of 2, {rank} of 2: [1.0, 3.0, 5.0]" for rank in (0, 1)]
#: Stands for the number of a rank below.
R = "{rank}"
#: By launcher: where its variables are documented, and what it gives to each of two ranks on one host.
LAUNCHERS: dict[str, tuple[str, dict[str, str]]] = {
    "Flux": (
        "flux-environment(7)",
        {"FLUX_JOB_ID": "f1", "FLUX_JOB_SIZE": "2", "FLUX_JOB_NNODES": "1", "FLUX_TASK_RANK": R,
         "FLUX_TASK_LOCAL_ID": R, "PMI_RANK": R, "PMI_SIZE": "2", "PMI_FD": "9"},
    ),
    "LSF, jsrun": (
        "IBM Job Step Manager, jsrun(1)",
        {"JSM_NAMESPACE_ID": "1", "JSM_NAMESPACE_RANK": R, "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_LOCAL_RANK": R,
         "JSM_NAMESPACE_LOCAL_SIZE": "2", "LSB_JOBID": "7"},
    ),
    "Intel MPI": (
        "Intel MPI Library Developer Reference, environment variables of the Hydra process manager",
        {"PMI_RANK": R, "PMI_SIZE": "2", "MPI_LOCALRANKID": R, "MPI_LOCALNRANKS": "2", "I_MPI_INFO_NP": "2"},
    ),
    "MPICH": (
        "MPICH wiki, Using the Hydra Process Manager",
        {"PMI_RANK": R, "PMI_SIZE": "2", "PMI_FD": "9", "MPI_LOCALRANKID": R, "MPI_LOCALNRANKS": "2"},
    ),
    "MVAPICH2": (
        "MVAPICH2 user guide, environment variables",
        {"MV2_COMM_WORLD_RANK": R, "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": R,
         "MV2_COMM_WORLD_LOCAL_SIZE": "2", "PMI_RANK": R, "PMI_SIZE": "2"},
    ),
    "Open MPI": (
        "mpirun(1) of Open MPI 5, Environment variables defined for MPI processes",
        {"OMPI_COMM_WORLD_RANK": R, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": R,
         "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": R, "PMIX_NAMESPACE": "prterun-1@1"},
    ),
    "PALS": (
        "mpiexec(1) of HPE Cray PALS",
        {"PALS_RANKID": R, "PALS_LOCAL_RANKID": R, "PALS_LOCAL_SIZE": "2", "PALS_NODEID": "0", "PALS_APID": "ab-cd",
         "PMI_RANK": R, "PMI_SIZE": "2"},
    ),
    "ALPS": (
        "aprun(1) of Cray ALPS; the sizes are those of Cray's PMI",
        {"ALPS_APP_PE": R, "ALPS_APP_ID": "4711", "ALPS_APP_DEPTH": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": R,
         "PMI_LOCAL_SIZE": "2"},
    ),
    "Slurm": (
        "srun(1), output environment variables",
        {"SLURM_PROCID": R, "SLURM_LOCALID": R, "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "1",
         "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "n1"},
    ),
}  # fmt: skip


@pytest.fixture
def train(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return str(path)


@pytest.mark.parametrize("name", list(LAUNCHERS))
def test_ranks_find_each_other_by_what_the_manual_says(name: str, train: str) -> None:
    source, variables = LAUNCHERS[name]
    ranks = [
        subprocess.Popen(
            [sys.executable, train],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **{key: value.format(rank=rank) for key, value in variables.items()}},
        )
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    assert sorted(line for out, _ in said for line in out.splitlines()) == EXPECTED, f"{source}: {said}"


@pytest.mark.parametrize("scheduler", ["PBS", "LSF"])
def test_horovodrun_in_an_allocation_of_this_host(scheduler: str, train: str, tmp_path: Path) -> None:
    """ "PBS Professional User's Guide", PBS_NODEFILE; IBM Spectrum LSF, environment variables set for job execution."""
    host = os.uname().nodename
    nodes = tmp_path / "nodes"
    nodes.write_text(f"{host}\n{host}\n")
    given = {
        "PBS": {"PBS_NODEFILE": str(nodes), "PBS_JOBID": "1.server"},
        "LSF": {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": f"{host} 2", "LSB_DJOB_NUMPROC": "2"},
    }[scheduler]
    ended = horovodrun(sys.executable, train, **given)
    assert ended.code == 0, ended.err
    assert f"hosts from {scheduler}: {host}:2" in ended.err
    assert sorted(line.partition(">:")[2] for line in ended.out.splitlines()) == EXPECTED


HOST = os.uname().nodename
#: By page: what its scheduler gives to a job script, and smaller numbers for its command.
JOBS: dict[str, tuple[dict[str, str], tuple[str, str]]] = {
    "pbs": ({"PBS_NODEFILE": "nodes", "PBS_JOBID": "1.server", "PBS_O_WORKDIR": "."}, ("", "")),
    "lsf": ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": f"{HOST} 2", "LSB_DJOB_NUMPROC": "2"}, ("", "")),
    "flux": ({}, ("-N 2 --tasks-per-node=4", "-N 1 --tasks-per-node=2")),
    "cray": ({"PBS_NODEFILE": "nodes", "PBS_O_WORKDIR": "."}, ("-n 8 --ppn 4", "-n 2 --ppn 2")),
}
#: Programs that are not here: the words that they take before the command, and the row of ``LAUNCHERS`` that they set.
PROGRAMS = {
    "flux": ("run -N 1 --tasks-per-node=2", "Flux"),
    "mpiexec": ("-n 2 --ppn 2 --depth 8 --cpu-bind depth --env", "PALS"),
}


def write_program(folder: Path, name: str) -> None:
    """Write a program that starts two ranks as a scheduler's would."""
    words, row = PROGRAMS[name]
    variables = " ".join(f"{key}={text.format(rank='$rank')}" for key, text in LAUNCHERS[row][1].items())
    lines = [
        "#!/bin/bash",
        f'for word in {words}; do [ "$1" = "$word" ] || exit 64; shift; done',
        'case "$1" in *=*) export "$1"; shift; esac',
        f'for rank in 0 1; do {variables} "$@" & done',
        "wait",
    ]
    (folder / name).write_text("\n".join(lines) + "\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("page", list(JOBS))
def test_the_job_script_of_a_page_starts_ranks(page: str, train: str, tmp_path: Path) -> None:
    variables, (asked, smaller) = JOBS[page]
    (script,) = re.findall(r"^```bash\n(#!/bin/bash\n.*?)^```$", (PAGES / f"{page}.md").read_text(), re.M | re.S)
    assert asked in script
    (tmp_path / "nodes").write_text(f"{HOST}\n{HOST}\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").touch()
    (tmp_path / "bin" / "module").symlink_to("/bin/true")
    for name in PROGRAMS:
        write_program(tmp_path / "bin", name)
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    ended = subprocess.run(
        ["bash", "-e", "-c", script.replace(asked, smaller)],
        cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, **variables, "PATH": path},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert sorted(re.sub(r"^\[\d\]<stdout>:", "", line) for line in ended.stdout.splitlines()) == EXPECTED
    assert (tmp_path / "timeline.json").exists() == (page == "cray")


STEP = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2,1", "SLURM_NTASKS": "3",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
}  # fmt: skip
SALLOC = {name: text for name, text in STEP.items() if "STEP" not in name and "ID" not in name} | {"SLURM_JOB_ID": "7"}
OTHERS = {"PBS_JOBID": "1", "PBS_NODEFILE": "/no", "LSB_JOBID": "3", "LSB_MCPU_HOSTS": "x 4", "PE_HOSTFILE": "/no"}
BY_HAND = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
OF_MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "HOROVOD_SECRET_KEY": "00",
}  # fmt: skip
OF_HOROVODRUN = {
    "HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_JOB_ID": "x", "HOROVOD_SECRET_KEY": "00",
}  # fmt: skip
OF_TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x",
    "MASTER_ADDR": "n1", "HOROVOD_SECRET_KEY": "00",
}  # fmt: skip
OWN_DAEMON = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_TASKS_PER_NODE": "1,1"}
#: Variables in one environment, and the launcher, rank, size, local rank and local size that they mean.
COMBINATIONS: dict[str, tuple[dict[str, str], tuple[str, int, int, int, int]]] = {
    "srun, with variables of PBS, LSF and Grid Engine": ({**STEP, **OTHERS}, ("slurm", 2, 3, 0, 1)),
    "srun, with MASTER_ADDR and WORLD_SIZE": (
        {**STEP, "WORLD_SIZE": "3", "MASTER_ADDR": "n1"}, ("slurm", 2, 3, 0, 1)
    ),
    "srun, with RANK=$SLURM_PROCID": ({**STEP, **BY_HAND}, ("slurm", 2, 3, 0, 1)),
    "srun, with LOCAL_RANK=$SLURM_LOCALID": ({**STEP, **BY_HAND, "LOCAL_RANK": "0"}, ("slurm", 2, 3, 0, 1)),
    "srun, with PMI2": ({**STEP, "PMI_RANK": "2", "PMI_SIZE": "3"}, ("slurm", 2, 3, 0, 1)),
    "srun, in a pod of an Indexed Job": (
        {**STEP, "KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, ("slurm", 2, 3, 0, 1)
    ),
    "mpirun, whose daemons srun starts": ({**STEP, **OWN_DAEMON, **OF_MPIRUN}, ("openmpi", 3, 4, 1, 2)),
    "torchrun, which srun starts": ({**STEP, **OWN_DAEMON, **OF_TORCHRUN}, ("torchrun", 3, 4, 1, 2)),
    "horovodrun, whose agents srun starts": ({**STEP, **OWN_DAEMON, **OF_HOROVODRUN}, ("horovodrun", 1, 2, 1, 2)),
    "a shell of salloc": (SALLOC, ("none", 0, 1, 0, 1)),
    "a batch script": ({**SALLOC, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, ("none", 0, 1, 0, 1)),
    "a shell of salloc that is a step": (
        {**STEP, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0",
         "SLURM_STEP_TASKS_PER_NODE": "1"}, ("slurm", 0, 1, 0, 1)
    ),
    "jobs of PBS, LSF and Grid Engine": (OTHERS, ("none", 0, 1, 0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", list(COMBINATIONS))
def test_variables_of_several_launchers_mean_one_world(name: str) -> None:
    environ, expected = COMBINATIONS[name]
    found = detect({"PATH": "/bin", **environ})
    assert (found.launcher, found.rank, found.size, found.local_rank, found.local_size) == expected


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
            "unset OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE",
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, "srun has started 3 tasks; unset PMI_RANK and PMI_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "unset RANK and WORLD_SIZE"),
        ({"HOROVOD_SIZE": "3"}, "HOROVOD_RANK is not: set both"),
    ],
    ids=["Open MPI", "MPICH", "torchrun", "aprun"],
)
def test_variables_that_another_launcher_left_are_named(left: dict[str, str], words: str) -> None:
    with pytest.raises(InitError, match=words):
        detect({"PATH": "/bin", **STEP, **left})


@pytest.mark.parametrize("environ", [SALLOC, {**SALLOC, **OTHERS}], ids=["alone", "with others"])
def test_horovodrun_in_a_shell_of_salloc_takes_its_hosts(environ: dict[str, str]) -> None:
    assert str(find_allocation(environ)) == "Slurm: n1:2,n2:1"
