"""Kubernetes and Flux without either: hosts of our own with the names, variables and files that pods and tasks get."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from namespaces import Cluster
from sources import ROOT

KEY = {"HOROVOD_SECRET_KEY": "ab" * 32, "OMP_NUM_THREADS": "1"}
IN_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
TRAIN = """
import sys
print("begun", flush=True)
import horovod.numpy as hvd
import numpy as np
hvd.init()
total = hvd.allreduce(np.full(3, hvd.rank() + 1.0), op=hvd.Sum)
place = f"{hvd.local_rank()} of {hvd.local_size()}, {hvd.cross_rank()} of {hvd.cross_size()}"
print(f"rank {hvd.rank()} of {hvd.size()}, {place}: {total.tolist()}", flush=True)
"""
APART = [f"rank {rank} of 3, 0 of 1, {rank} of 3: [6.0, 6.0, 6.0]" for rank in range(3)]


def start(cluster: Cluster, host: str, words: Sequence[str], **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        cluster.machines[host].command(*words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environ},
    )


def last_lines(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """The last line of each, when all have ended well."""
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert not any(process.returncode for process in processes), outputs
    return [output.splitlines()[-1] for output in outputs]


@pytest.fixture
def names(cluster: Cluster) -> Path:
    """The file with the names of all hosts, which a test may add to."""
    return cluster.folder / "hosts"


def indexed_pod(cluster: Cluster, names: Path, index: int, script: str, **more: str) -> subprocess.Popen[str]:
    """Starts a pod of an Indexed Job on a host of its own, whose name is known from now on."""
    line = f"{cluster.machines['abc'[index]].ipv4} train-{index}.train.default.svc.cluster.local train-{index}\n"
    with names.open("a") as file:  # in place: it is mounted
        file.write(line)
    named = ["unshare", "-u", "sh", "-c", f'hostname train-{index}; exec "$0" -c "$1"', sys.executable, script]
    given = {**KEY, **IN_POD, "JOB_COMPLETION_INDEX": str(index), "HOROVOD_SIZE": "3", **more}
    return start(cluster, "abc"[index], named, **given)


def test_pods_of_an_indexed_job_meet_though_the_first_ones_name_comes_late(cluster: Cluster, names: Path) -> None:
    pods = [indexed_pod(cluster, names, index, TRAIN) for index in (1, 2)]
    for one in pods:
        assert one.stdout.readline() == "begun\n"
    assert last_lines([indexed_pod(cluster, names, 0, TRAIN), *pods]) == APART


AGAIN = """
import os, signal
import horovod.numpy as hvd
import numpy as np
hvd.init()
hvd.barrier()
if hvd.rank() == 1 and "DIES" in os.environ:
    os.kill(os.getpid(), signal.SIGKILL)
total = hvd.allreduce(np.full(3, hvd.rank() + 1.0), op=hvd.Sum)
print(f"rank {hvd.rank()} of {hvd.size()}, 0 of 1, {hvd.cross_rank()} of 3: {total.tolist()}", flush=True)
"""


def test_pods_that_an_indexed_job_restarts_meet_again(cluster: Cluster, names: Path) -> None:
    """With ``backoffLimitPerIndex`` each pod is restarted when it has ended, the failed one first."""
    first = [indexed_pod(cluster, names, rank, AGAIN, DIES="1") for rank in range(3)]
    again = []
    for rank in (1, 2, 0):
        output = first[rank].communicate(timeout=300)[0]
        assert first[rank].returncode and ("PeerLostError: rank 1" in output) == (rank != 1), output
        again.append(indexed_pod(cluster, names, rank, AGAIN))
    assert sorted(last_lines(again)) == APART


LEAVE = """
import os, signal
import horovod.numpy as hvd
import numpy as np
hvd.on_leave(lambda: print(f"rank {hvd.rank()} of pid {os.getpid()} leaves", flush=True))
hvd.init()
for step in range(9):
    if hvd.rank() == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGTERM)
    hvd.allreduce(np.ones(2), name=f"step {step}")
"""


def test_sigterm_ends_a_rank_that_is_the_first_process_of_its_pod(cluster: Cluster) -> None:
    """The kernel ignores signals to such a process, unless it has a handler."""
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": cluster.machines["a"].ipv4, "MASTER_PORT": "23457"}
    words = ["unshare", "-pf", "--mount-proc", sys.executable, "-c", LEAVE]
    pods = [start(cluster, "ac"[rank], words, **KEY, **IN_POD, **given, RANK=str(rank)) for rank in range(2)]
    outputs = [pod.communicate(timeout=300)[0] for pod in pods]
    assert "rank 1 (pid 1 on c) died" in outputs[0]
    assert outputs[1].splitlines()[0] == "rank 1 of pid 1 leaves"
    assert [pod.returncode for pod in pods] == [1, 128 + 15]


def test_pods_without_a_common_secret_say_how_to_make_one(cluster: Cluster) -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "23456"}
    pod = start(cluster, "b", [sys.executable, "-c", TRAIN], **IN_POD, **given)
    output, _ = pod.communicate(timeout=300)
    assert "pods from one Secret): export HOROVOD_SECRET_KEY=" in output


@pytest.mark.parametrize("is_torchrun", [False, True], ids=["operator's variables", "torchrun"])
def test_pods_of_a_pytorch_job_or_a_train_job(is_torchrun: bool, cluster: Cluster, tmp_path: Path) -> None:
    """Both set PET_* for torchrun; PyTorchJob sets RANK and WORLD_SIZE of the pods, too."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    words = [sys.executable, *(["-m", "torch.distributed.run"] if is_torchrun else []), str(script)]
    pods = []
    for node, host in enumerate("ac"):  # torchrun's end takes minutes where clocks since boot differ as b's does
        address = cluster.machines["a"].ipv4
        given = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(node)}
        given |= {"PET_MASTER_ADDR": address, "PET_MASTER_PORT": "23456"}
        if not is_torchrun:
            given |= {"RANK": str(node), "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "23456"}
        pods.append(start(cluster, host, words, **KEY, **IN_POD, **given))
    assert sorted(last_lines(pods)) == [f"rank {rank} of 2, 0 of 1, {rank} of 2: [3.0, 3.0, 3.0]" for rank in range(2)]


def test_tasks_of_flux_find_each_other_through_the_users_folder(cluster: Cluster, tmp_path: Path) -> None:
    tasks = [
        start(
            cluster, "abc"[node], [sys.executable, "-c", TRAIN], OMP_NUM_THREADS="1", HOME=str(tmp_path),
            FLUX_TASK_RANK=str(node), FLUX_JOB_SIZE="3", FLUX_TASK_LOCAL_ID="0", FLUX_JOB_NNODES="3", FLUX_JOB_ID="f2Q",
        )
        for node in range(3)
    ]  # fmt: skip
    assert last_lines(tasks) == APART
    assert not list((tmp_path / ".horovod").iterdir())


@pytest.mark.parametrize("line", ["{name} slots=1", "{name}:1"], ids=["Open MPI", "Intel and MPICH"])
def test_the_launcher_of_an_mpi_job_waits_for_names_of_workers(
    line: str, cluster: Cluster, names: Path, tmp_path: Path
) -> None:
    """The operator's ConfigMap lies at /etc/mpi; DNS knows the workers seconds after they run."""
    workers = [f"mpi{len(line)}-worker-{i}.mpi.default.svc" for i in range(2)]
    (tmp_path / "mpi").mkdir()
    (tmp_path / "mpi" / "hostfile").write_text("".join(line.format(name=worker) + "\n" for worker in workers))
    (tmp_path / "etc").mkdir()
    setup = (
        f"cp -a /etc/. {tmp_path}/etc; cp -r {tmp_path}/mpi {tmp_path}/etc/; mount --bind {tmp_path}/etc /etc; "
        f'mount --bind {names} /etc/hosts; exec "$0" -m horovod.launch.cli -np 2 "$0" -c "$1"'
    )
    key = " ".join((cluster.folder / "host_key.pub").read_text().split()[:2])
    with (cluster.folder / "known_hosts").open("a") as file:
        file.write(f"*.mpi.default.svc {key}\n")
    launcher = start(
        cluster,
        "login",
        ["unshare", "-m", "sh", "-c", setup, sys.executable, TRAIN],
        K_MPI_JOB_ROLE="launcher",
        **IN_POD,
    )
    assert launcher.stdout.readline().startswith("horovodrun: hosts from MPIJob: mpi")
    line_of_wait = launcher.stdout.readline()
    assert "cannot be reached yet" in line_of_wait
    with names.open("a") as file:
        for name, worker in zip("ab", workers, strict=True):
            file.write(f"{cluster.machines[name].ipv4} {worker}\n")
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, output
    lines = [text.partition(":")[2] for text in output.splitlines() if "rank" in text and "of 2" in text]
    assert sorted(lines) == [f"rank {r} of 2, 0 of 1, {r} of 2: [3.0, 3.0, 3.0]" for r in range(2)]


ELASTIC = """
import os
import horovod.numpy as hvd
import numpy as np
hvd.on_leave(lambda: print("leaves", os.uname().nodename, flush=True))
hvd.init()
state = hvd.elastic.NumpyState(w=np.zeros(2), expected=0, sizes=[])

@hvd.elastic.step
def one_step(state):
    state.w += hvd.allreduce(np.full(2, hvd.rank() + 1.0), op=hvd.Sum, name="step")
    state.expected += sum(range(hvd.size() + 1))
    state.sizes = [*state.sizes, hvd.size()][-6:]

@hvd.elastic.run
def train(state):
    has_shrunk = False
    while not has_shrunk or state.sizes != [2] * 6:
        one_step(state)
        has_shrunk = has_shrunk or hvd.size() == 1 or state.sizes[0] == 1
        if state.progress == 3:
            print("trains on", os.uname().nodename, flush=True)

train(state)
is_right = state.w.tolist() == [state.expected] * 2
print(f"one of {hvd.size()} on {os.uname().nodename}: {is_right}", flush=True)
"""


def test_a_worker_of_an_mpi_job_that_comes_back_with_another_address_joins(tmp_path: Path, cluster: Cluster) -> None:
    """As docs/clusters/kubernetes.md has it: the operator's script lists the pods that run, by names that stay."""
    (job,) = yaml.safe_load_all((ROOT / "docs" / "clusters" / "mpijob.yaml").read_text(encoding="utf-8"))
    (worker,) = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    pre_stop = worker["lifecycle"]["preStop"]["exec"]["command"]
    (folder := tmp_path / "cluster").mkdir()
    with Cluster(folder) as own:
        pods = [f"train-worker-{i}.train.default.svc" for i in range(2)]
        key = " ".join((folder / "host_key.pub").read_text().split()[:2])
        (folder / "known_hosts").write_text(f"*.train.default.svc {key}\n")
        others = (folder / "hosts").read_text()

        def place(hosts: str) -> None:
            lines = [f"{own.machines[host].ipv4} {pod}\n" for host, pod in zip(hosts, pods, strict=True)]
            (folder / "hosts").write_text(others + "".join(lines))

        place("ab")
        script = tmp_path / "discover_hosts.sh"
        script.write_text("#!/bin/sh\n" + "".join(f"echo {pod}\n" for pod in pods))
        script.chmod(0o755)
        flags = ["--min-np", "1", "--max-np", "2", "-np", "2", "--host-discovery-script", str(script)]
        words = [sys.executable, "-m", "horovod.launch.cli", *flags, sys.executable, "-c", ELASTIC]
        launcher = start(own, "login", words, **IN_POD, OMP_NUM_THREADS="1")
        while "trains on b" not in (line := launcher.stdout.readline()):
            assert line, "ended too soon"
        subprocess.run(own.machines["b"].command(*pre_stop), check=False, timeout=300)
        own.crash("b")
        place("ac")
        output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, output
    assert "leaves b\n" in output
    assert re.search(rf"^horovodrun: rank . \(pid \d+ on {pods[1]}:0\) left; 1 rank continues", output, re.M), output
    found = sorted(line.partition(">:")[2] for line in output.splitlines() if ">:one of" in line)
    assert found == ["one of 2 on a: True", "one of 2 on c: True"], output
