"""Launchers that cannot be had here: real ranks with the variables that their manuals document find each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import TIMEOUT_S, horovodrun

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
    assert sorted(line.partition(">:")[2] for line in ended.out.splitlines()) == EXPECTED
