"""Hosts and slots of allocations: variables and files as each scheduler's manual has them."""

from __future__ import annotations

from typing import Any

import pytest

from horovod.launch.allocation import find_allocation, spread
from horovod.launch.assemble import choose_hosts
from horovod.launch.hosts import HostSlots, Place
from horovod.launch.ssh import Access, command_line, diagnose

SALLOC = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "n[1-2],gpu07",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_CPUS_PER_NODE": "16(x2),8",
}
HETEROGENEOUS = {
    "SLURM_JOB_ID": "1",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "a",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "b,c",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "3,1",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "1",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "3,1",
}
BRACKETS = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "r[1-2]n[01-02],x[1,3]y0",
    "SLURM_TASKS_PER_NODE": "2(x3),1,4(x2)",
}
FILES = {
    "/pe": "n1.site 2 all.q@n1.site UNDEFINED\nn2.site 1 all.q@n2.site <NULL>\n",
    "/nodes": "n1\nn1\nn2\n",
    "/full": "n1.site\r\nn2.site\r\nn1.site\r\n\r\n",
    "/none": "\n",
    "/etc/mpi/hostfile": "job-worker-0.job.default.svc slots=2\njob-worker-1.job.default.svc:3\njob-worker-2.job\n",
}


@pytest.mark.parametrize(
    ("environ", "said", "starter"),
    [
        (SALLOC, "Slurm: n1:2,n2:2,gpu07:1", "srun"),
        (HETEROGENEOUS, "Slurm: a:1,b:3,c:1", "srun"),
        (BRACKETS, "Slurm: r1n01:2,r1n02:2,r2n01:2,r2n02:1,x1y0:4,x3y0:4", "srun"),
        ({"PE_HOSTFILE": "/pe"}, "Grid Engine: n1.site:2,n2.site:1", "qrsh"),
        ({"PBS_NODEFILE": "/nodes"}, "PBS: n1:2,n2:1", "ssh"),
        ({"PBS_NODEFILE": "/full"}, "PBS: n1.site:2,n2.site:1", "ssh"),
        ({"COBALT_NODEFILE": "/nodes"}, "Cobalt: n1:2,n2:1", "ssh"),
        ({"OAR_NODEFILE": "/nodes"}, "OAR: n1:2,n2:1", "oarsh"),
        ({"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": "/nodes"}, "LSF: n1:2,n2:1", "blaunch"),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "n1 4 n2 2"}, "LSF: n1:4,n2:2", "blaunch"),
        ({"LSB_JOBID": "7", "LSB_HOSTS": "n1 n1 n2"}, "LSF: n1:2,n2:1", "blaunch"),
        ({"K_MPI_JOB_ROLE": "launcher"}, "MPIJob: job-worker-0.job.default.svc:2,job-worker-1.job.default.svc:3,"
         "job-worker-2.job:1", "ssh"),
        ({"K_MPI_JOB_ROLE": "worker"}, "None", ""),
        ({**SALLOC, "SLURM_STEP_NUM_TASKS": "4"}, "None", ""),
        ({"PATH": "/bin"}, "None", ""),
    ],
    ids=["Slurm", "heterogeneous", "brackets", "Grid Engine", "PBS", "domains", "Cobalt", "OAR", "LSF file",
         "LSF counts", "LSF names", "MPIJob",
         "worker of an MPIJob", "one of several tasks", "none"],
)  # fmt: skip
def test_hosts_and_slots(environ: dict[str, str], said: str, starter: str) -> None:
    found = find_allocation(environ, FILES.__getitem__)
    assert str(found) == said
    if found is not None:
        access = Access("/usr/bin/python", starters=found.starters)
        assert command_line(found.hosts[-1].name, access)[0] == starter


def test_agents_of_slurm_get_all_cores_of_their_node_beside_other_steps() -> None:
    found = find_allocation(SALLOC)
    words = command_line("gpu07", Access("/usr/bin/python", starters=found.starters))
    assert {"--overlap", "--nodelist=gpu07", "--cpus-per-task=8", "--mpi=none"} < set(words)
    assert words[-3:] == ["/usr/bin/python", "-m", "horovod.launch.agent"]
    both = find_allocation(HETEROGENEOUS)
    assert [words[-1] for words in both.starters.values()] == ["--het-group=0", "--het-group=1", "--het-group=1"]
    why = diagnose("gpu07", Access("python", starters=found.starters), 1, "srun: error: Node gpu07 is down\n")
    assert why.startswith(
        "gpu07: srun could not start an agent there (srun: error: Node gpu07 is down); see what `srun "
    )


def test_agents_of_slurm_get_the_gpus_of_all_tasks_of_their_node() -> None:
    for given, flag in {"1": "--gres=gpu:2", "a100:2": "--gres=gpu:a100:4"}.items():
        found = find_allocation({**SALLOC, "SLURM_GPUS_PER_TASK": given})
        assert {flag, "--gpu-bind=none"} < set(found.starters["n1"])
    for error in (
        "srun: error: Unable to create step for job 7: Invalid generic resource (gres) specification",
        "srun: fatal: --ntasks-per-node is mutually exclusive with --ntasks-per-gpu and SLURM_NTASKS_PER_GPU",
    ):
        why = diagnose("n1", Access("python", starters=found.starters), 1, error)
        assert why.endswith(f"({error}); ask Slurm for --gpus-per-node, not for --gpus")


def test_more_ranks_than_tasks_are_spread_evenly() -> None:
    found = find_allocation(SALLOC)
    assert spread(found, 5) == [HostSlots("n1", 2), HostSlots("n2", 2), HostSlots("gpu07", 1)]
    assert spread(found, 8) == [HostSlots("n1", 3), HostSlots("n2", 3), HostSlots("gpu07", 2)]


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**SALLOC, "SLURM_TASKS_PER_NODE": "2"}, ("3 nodes",)),
        (
            {**SALLOC, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_TASKS_PER_NODE": "1"},
            ("3 nodes", "srun --preserve-env --pty"),
        ),
        ({**SALLOC, "SLURM_TASKS_PER_NODE": "2(x3,"}, ("SLURM_TASKS_PER_NODE: ", "2(x3),1; received '2(x3,'")),
        ({**SALLOC, "SLURM_JOB_CPUS_PER_NODE": "many"}, ("SLURM_JOB_CPUS_PER_NODE: ", "received 'many'")),
        ({**SALLOC, "SLURM_HET_SIZE": "two"}, ("SLURM_HET_SIZE", "'two'")),
        ({**SALLOC, "SLURM_TASKS_PER_NODE": "2(x2),0"}, ("above 0, received 'gpu07:0'",)),
        ({**SALLOC, "SLURM_JOB_NODELIST": "n[1-2"}, ("0 nodes",)),
        ({"PE_HOSTFILE": "/nodes"}, ("/nodes", "Grid Engine")),
        ({"PBS_NODEFILE": "/none"}, ("PBS lists none",)),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "n1 4 n2"}, ("LSB_MCPU_HOSTS", "'n1 4 n2'")),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "n1 four"}, ("LSB_MCPU_HOSTS", "'n1 four'")),
    ],
    ids=[
        "Slurm",
        "srun --pty",
        "counts",
        "cores",
        "components",
        "no task",
        "bracket",
        "Grid Engine",
        "PBS",
        "LSF without number",
        "LSF without digits",
    ],
)
def test_lists_that_make_no_sense_are_refused(environ: dict[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        find_allocation(environ, FILES.__getitem__)
    assert all(word in str(error.value) for word in (*words, "name them with -H"))


def test_hosts_of_the_user_replace_those_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PBS_NODEFILE", "/nonexistent/nodes")
    with pytest.raises(ValueError, match="/nonexistent/nodes"):
        choose_hosts("", "", 2)
    assert choose_hosts("n1:2", "", 2).places == [Place("n1", 2, False)]


def test_a_list_that_cannot_be_read_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("none") / "nodes"
    with pytest.raises(ValueError, match=str(path)):
        find_allocation({"PBS_NODEFILE": str(path)})


@pytest.mark.parametrize("num_proc", [0, "2", 1.5])
def test_a_number_of_ranks_that_is_none_is_named(num_proc: Any) -> None:
    with pytest.raises(ValueError, match=rf"-np \(num_proc\) must be at least 1; received {num_proc!r}"):
        choose_hosts("", "", num_proc)
