"""Ranks that others than horovodrun have started on several hosts meet, and hear of a host that is lost."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import Cluster

pytestmark = pytest.mark.slow

WHO = """
import os, numpy as np, horovod.numpy as hvd
hvd.init()
total = hvd.allreduce(np.ones(3) * hvd.rank(), op=hvd.Sum).tolist()
place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
print(f"{place} {os.uname().nodename} {total}\\n", end="", flush=True)
hvd.shutdown()
"""
LOOP = """
import numpy as np, horovod.numpy as hvd
hvd.init()
hvd.allreduce(np.ones(3), name="first")
if hvd.rank() == 0:
    print("under way", flush=True)
try:
    while True:
        for _ in range(10):
            hvd.allreduce(np.ones(3), name="x")
        if hvd.rank() == 0:
            print("and on", flush=True)
except hvd.HorovodInternalError as error:
    print(f"{hvd.rank()}: {error}", flush=True)
"""
KEY = {"HOROVOD_SECRET_KEY": "ab" * 32, "OMP_NUM_THREADS": "1"}
EXPECTED = [f"({rank}, 4, {rank % 2}, 2, {rank // 2}, 2) {'ab'[rank // 2]} [6.0, 6.0, 6.0]" for rank in range(4)]
TIMEOUT_S = 120.0
MPIS = {
    "openmpi": ["--allow-run-as-root", "--bind-to", "none", "-H", "a:2,b:2"],
    "mpich": ["-bind-to", "none", "-iface", "eth0", "-hosts", "a:2,b:2"],
}


def start(cluster: Cluster, host: str, words: list[str], environ: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        cluster.machines[host].command(*words),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environ},
    )  # fmt: skip


def slurm(rank: int) -> dict[str, str]:
    """Variables of srun for a task of four on the hosts a and b."""
    said = {
        "PROCID": rank, "STEP_NUM_TASKS": 4, "STEP_TASKS_PER_NODE": "2(x2)", "NODEID": rank // 2, "LOCALID": rank % 2,
        "JOB_ID": os.getpid(), "STEP_ID": 0, "STEP_NODELIST": "a,b",
    }  # fmt: skip
    return {**KEY, **{f"SLURM_{name}": str(value) for name, value in said.items()}}


def tasks(cluster: Cluster, script: str, **environ: str) -> list[subprocess.Popen[str]]:
    """Four tasks as srun starts them."""
    command = [sys.executable, "-c", script]
    return [start(cluster, "ab"[rank // 2], command, {**slurm(rank), **environ}) for rank in range(4)]


def said(processes: list[subprocess.Popen[str]]) -> list[str]:
    """All that processes say, in order, once they have ended well."""
    texts = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), texts
    return sorted(line for text in texts for line in text.splitlines() if line.startswith("("))


def test_torchrun(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "who.py").write_text(WHO)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    torchrun += ["--master-addr", cluster.machines["a"].ipv4, "--master-port", "29511", "--node-rank"]
    nodes = [start(cluster, host, [*torchrun, str(i), str(tmp_path / "who.py")], KEY) for i, host in enumerate("ab")]
    assert said(nodes) == EXPECTED


@pytest.mark.mpi("openmpi")
def test_mpirun_of_open_mpi(cluster: Cluster, mpirun: list[str]) -> None:
    words = [mpirun[0], "--allow-run-as-root", "-np", "4", "-H", "a:2,b:2", sys.executable, "-c", WHO]
    assert said([start(cluster, "a", words, {"OMP_NUM_THREADS": "1"})]) == EXPECTED


@pytest.mark.mpi("mpich")
def test_hosts_of_one_name_of_which_one_has_no_room_for_temporary_files(
    cluster: Cluster, mpirun: list[str], tmp_path: Path
) -> None:
    full, b = tmp_path / "full", cluster.machines["b"]
    full.mkdir()
    fill = f"hostname a; mount -t tmpfs -o size=4k none {full} && ! cat /dev/zero > {full}/file"
    subprocess.run(b.command("sh", "-c", fill), check=True, stderr=subprocess.DEVNULL)
    try:
        words = [mpirun[0], *MPIS["mpich"], "-np", "4", sys.executable, "-c", WHO]
        texts = said([start(cluster, "a", words, {**mpi_of(mpirun), "TMPDIR": str(full)})])
    finally:
        subprocess.run(b.command("sh", "-c", f"hostname b; umount -l {full}"), check=True)
    assert texts == [text.replace(" b ", " a ") for text in EXPECTED]


def mpi_of(mpirun: list[str]) -> dict[str, str]:
    """The environment in which ranks find the library of an mpirun."""
    library = str(Path(mpirun[0]).parent.parent / "lib")
    return {"OMP_NUM_THREADS": "1", "UCX_TLS": "tcp,self", "LD_LIBRARY_PATH": library}


def test_srun(cluster: Cluster) -> None:
    assert said(tasks(cluster, WHO)) == EXPECTED


KILLED = """
import os, signal, sys, numpy as np, horovod.numpy as hvd
hvd.init()
for _ in range(5):
    hvd.allreduce(np.ones(30_000), name="x")
if hvd.rank() == 3:
    print("rank 3 is killed", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    hvd.allreduce(np.ones(30_000), name="never")
    print("a rank went on", flush=True)
except hvd.HorovodInternalError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.mpi(kind)) for kind in MPIS])
def test_a_rank_killed_under_mpirun_ends_the_job_on_all_hosts(kind: str, cluster: Cluster, mpirun: list[str]) -> None:
    before = {host: set(cluster.processes(host)) for host in "ab"}
    words = [mpirun[0], *MPIS[kind], "-np", "4", sys.executable, "-c", KILLED]
    process = start(cluster, "a", words, mpi_of(mpirun))
    text, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode != 0
    assert "rank 3 is killed" in text and "a rank went on" not in text, text
    # mpirun may end the others before they can say so, which those then say of each other.
    assert text.count("PeerLostError: ") == text.count("PeerLostError: rank "), text
    for host, known in before.items():
        for pid, line in cluster.processes(host).items():
            if pid not in known and not line.startswith("sshd"):
                assert _ends(pid), f"left on {host}: {line}"


def _ends(pid: int) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], TIMEOUT_S)[0])
    finally:
        os.close(fd)


def test_a_host_whose_cable_is_pulled_is_named_by_all_others(cluster: Cluster) -> None:
    processes = tasks(cluster, LOOP, HOROVOD_HOST_TIMEOUT="3")
    assert processes[0].stdout.readline() == "under way\n"
    cluster.cut("b")  # for a moment, after which all goes on
    cluster.mend("b")
    for _ in range(2):
        assert processes[0].stdout.readline() == "and on\n"
    cluster.cut("b")
    try:
        texts = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        cluster.mend("b")
    for rank, text in enumerate(texts[:2]):
        assert f"{rank}: " in text and "host b" in text, texts
    for rank, text in enumerate(texts[2:], start=2):
        assert f"{rank}: " in text and "host a" in text, texts


STEP = """
import json, os, subprocess, sys
given = json.loads(sys.argv[2])
tasks = [subprocess.Popen([sys.executable, "-c", script], env={**os.environ, **more}) for script, more in given]
for task in tasks:
    task.wait()
"""
LATE = """
import horovod.numpy as hvd
try:
    hvd.init()
except hvd.HorovodInternalError as error:
    print(f"{type(error).__name__}: {error}\\n", end="", flush=True)
"""


@pytest.mark.parametrize("gone", [0, 2])
def test_all_hosts_hear_of_a_task_of_srun_that_ended_before_init(gone: int, cluster: Cluster) -> None:
    steps = []
    for first, host in ((0, "a"), (2, "b")):
        tasks = [("" if rank == gone else LATE, slurm(rank)) for rank in (first, first + 1)]
        words = [sys.executable, "-c", STEP, "slurmstepd", json.dumps(tasks)]
        steps.append(start(cluster, host, words, {"HOROVOD_START_TIMEOUT": "600"}))
    lines = [line for step in steps for line in step.communicate(timeout=TIMEOUT_S)[0].splitlines()]
    told = [line for line in lines if line.startswith("PeerLostError: ")]
    assert len(told) == 3, lines
    assert all(f"on host {'ab'[gone // 2]}, by local rank: rank 0" in line for line in told), lines
