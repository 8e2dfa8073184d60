"""Variables of schedulers: who a pod or a task is, and where the others are."""

from __future__ import annotations

import pytest

from horovod.errors import InitError
from horovod.launchers import first_pod, flux_counts, hosts_and_run, slurm_counts, slurm_hosts
from horovod.world import Meeting, detect


@pytest.mark.parametrize(
    ("spec", "nodes"),
    [
        ("a", "a"),
        ("a,b", "a b"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[08-10,12]-ib,login", "n08-ib n09-ib n10-ib n12-ib login"),
        ("r[1-2]n[0-1]", "r1n0 r1n1 r2n0 r2n1"),
        ("", ""),
    ],
)
def test_the_nodes_of_a_step(spec: str, nodes: str) -> None:
    assert slurm_hosts({"SLURM_STEP_NODELIST": spec}) == tuple(nodes.split())


def test_the_nodes_of_a_heterogeneous_step_are_not_in_the_order_of_its_components() -> None:
    """As of ``srun -n1 -w b : -n3 -w a,c``."""
    step = {"SLURM_STEP_NODELIST": "a,b,c", "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)", "SLURM_LOCALID": "0"}
    for name, number, place in (("b", "0", 1), ("a", "1", 0), ("c", "2", 2)):
        assert slurm_counts(4, {**step, "SLURMD_NODENAME": name, "SLURM_NODEID": number}) == (0, place, [2, 1, 1])
    unknown = {**step, "SLURMD_NODENAME": "d", "SLURM_NODEID": "1"}
    assert slurm_counts(4, unknown) == (0, 1, [2, 1, 1])


POD = {
    "JOB_COMPLETION_INDEX": "2",
    "HOROVOD_SIZE": "3",
    "HOROVOD_SECRET_KEY": "00ff",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
}


def test_a_pod_of_an_indexed_job_is_one_rank_and_meets_the_first_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "horovod.world.hosts_and_run", lambda row, environ: hosts_and_run(row, environ, lambda: "t-2.t.x")
    )
    found = detect(POD)
    assert (found.rank, found.size, found.local_rank, found.local_size, found.cross_rank) == (2, 3, 0, 1, 2)
    assert (found.launcher, found.key, found.meeting.places) == ("kubernetes", b"\x00\xff", ("t-0.t.x",))
    assert found.meeting.run == "kubernetes/t-0.t.x"
    assert detect({name: text for name, text in POD.items() if name != "HOROVOD_SIZE"}).launcher == "none", (
        "a job of single pods"
    )


def test_a_pod_without_a_service_says_what_is_missing() -> None:
    assert first_pod("train-12.train.default.svc", "12") == "train-0.train.default.svc"
    for name in ("train-2-x7k9p", "train-2", "train-3.train.default.svc"):
        with pytest.raises(InitError, match="headless Service"):
            first_pod(name, "2")


def test_pods_to_which_an_operator_gives_a_rank_are_hosts() -> None:
    """As PyTorchJob does for a command that is not torchrun."""
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "j-master-0", "MASTER_PORT": "23456", "PET_NNODES": "2"}
    given |= {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOROVOD_SECRET_KEY": "00ff"}
    found = detect(given)
    assert detect({**given, "JOB_COMPLETION_INDEX": "0"}) == found, "one of several Jobs, such as of a JobSet"
    assert (found.rank, found.size, found.local_rank, found.local_size, found.cross_rank) == (1, 2, 0, 1, 1)
    assert found.meeting == Meeting("hosts", ("j-master-0",), "torchrun//23456", True)


@pytest.mark.parametrize("nodes", ["3", "1:3"])
def test_a_pod_that_needs_torchrun_does_not_train_alone(nodes: str) -> None:
    """A TrainJob, or an elastic PyTorchJob, gives its pods no rank."""
    given = {"PET_NNODES": nodes, "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "train-node-0-0"}
    with pytest.raises(InitError, match=f"PET_NNODES={nodes} .* alone: write torchrun train.py"):
        detect(given)
    assert detect({**given, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}).size == 1
    assert detect({**given, "PET_NNODES": "1"}).launcher == "none"


def test_flux_with_uneven_nodes_says_what_to_ask_for() -> None:
    given = {"FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2"}
    assert flux_counts(3, 4, given) == (1, 2)
    with pytest.raises(InitError, match="--tasks-per-node"):
        flux_counts(3, 5, given)


@pytest.mark.parametrize("rank", ["ALPS_APP_PE", "PALS_RANKID"])
def test_mpi_gives_the_size_that_a_cray_does_not(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On its compute nodes, another program than aprun or mpiexec is the parent of the ranks."""
    given = {rank: "3", "HOROVOD_JOB_ID": "j", "HOROVOD_SECRET_KEY": "00ff"}
    monkeypatch.setattr("horovod.world._size_by_mpi", lambda: 4)
    found = detect(given)
    assert (found.rank, found.size) == (3, 4)
    monkeypatch.setattr("horovod.world._size_by_mpi", lambda: 1)
    with pytest.raises(InitError, match="neither PMI_SIZE nor MPI how many there are; install mpi4py"):
        detect(given)
