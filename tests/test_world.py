"""The place of a process in its job: tables of what launchers set, a made-up process table, and the real launchers."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from commands import run

from horovod.errors import InitError
from horovod.world import Meeting, World, detect, part_of

ALONE = World(0, 1, 0, 1, 0, 1, os.uname().nodename, "none", "", b"")
GIVEN = {"HOROVOD_JOB_ID": "j", "HOROVOD_SECRET_KEY": "00ff"}
HOROVODRUN = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_HOSTNAME": "box",
    **GIVEN,
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
CRAY = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
JSRUN = {f"JSM_NAMESPACE_{k}": v for k, v in (("RANK", "3"), ("SIZE", "4"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2"))}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "t"}
PALS = {
    "PALS_RANKID": "3",
    "PALS_LOCAL_RANKID": "1",
    "PALS_NODEID": "1",
    "PALS_APID": "ab-cd",
    "PALS_DEPTH": "1",
    **CRAY,
}
ALPS = {"ALPS_APP_PE": "3", "ALPS_APP_DEPTH": "1", "ALPS_APP_ID": "77"}
ALPS_BY_HAND = {**ALPS, "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_SIZE": "2"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "9",
}


MVAPICH = {
    f"MV2_COMM_WORLD_{k}": v for k, v in (("RANK", "3"), ("SIZE", "4"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2"))
}
FLUX = {
    "FLUX_TASK_RANK": "3",
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "f2Q",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}


class ProcessTable:
    """A made-up /proc: each process has a parent, and an environment."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, pid: int, parent: int, environ: dict[str, str], start: int = 77, auxv: bytes = b"secret") -> None:
        folder = self.root / str(pid)
        folder.mkdir()
        rest = ["0"] * 17
        (folder / "stat").write_text(f"{pid} (a (b) c) S {parent} {' '.join(rest)} {start} 0 0\n")
        (folder / "environ").write_bytes(b"".join(f"{k}={v}\0".encode() for k, v in environ.items()))
        (folder / "auxv").write_bytes(auxv)


@pytest.fixture
def table(tmp_path: Path) -> ProcessTable:
    """A daemon 10 with ranks 20 and 21; rank 21 behind a shell that inherited its rank."""
    processes = ProcessTable(tmp_path)
    processes.add(10, 1, {"HOME": "/"})
    for pid, parent, rank in ((20, 10, 0), (30, 10, 1), (21, 30, 1)):
        every = {
            "PALS_RANKID",
            "ALPS_APP_PE",
            "OMPI_COMM_WORLD_RANK",
            "PMI_RANK",
            "RANK",
            "SLURM_PROCID",
            "JSM_NAMESPACE_RANK",
            "MV2_COMM_WORLD_RANK",
            "FLUX_TASK_RANK",
            "HOROVOD_RANK",
        }
        processes.add(pid, parent, dict.fromkeys(every, str(rank)))
    return processes


def test_no_launcher_is_one_rank() -> None:
    assert detect({"PATH": "/bin"}) == ALONE


@pytest.mark.parametrize(
    ("name", "environ"),
    [
        ("openmpi", OPENMPI),
        ("mpich", MPICH),
        ("mpich", CRAY),
        ("pals", PALS),
        ("alps", ALPS_BY_HAND),
        ("alps", {**ALPS, **CRAY}),
        ("jsrun", JSRUN),
        ("torchrun", TORCHRUN),
        ("slurm", SLURM),
        ("mvapich", {**MVAPICH, **MPICH}),
        ("flux", FLUX),
        ("slurm", {**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}),
        ("slurm", {**SLURM, "PALS_RANKID": "3", "PALS_APID": "9.0"}),
        ("mpich", {**SLURM, **MPICH, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}),
    ],
    ids=[
        "openmpi",
        "mpich",
        "cray",
        "pals",
        "aprun by hand",
        "aprun with PMI",
        "jsrun",
        "torchrun",
        "slurm",
        "mvapich",
        "flux",
        "srun --mpi=pmi2",
        "srun --mpi=cray_shasta",
        "mpiexec whose proxies srun has started",
    ],
)
def test_launchers_are_read(name: str, environ: dict[str, str], table: ProcessTable) -> None:
    found = detect(environ, proc=table.root, pid=20)
    assert (found.rank, found.size, found.local_rank, found.local_size) == (3, 4, 1, 2)
    assert (found.cross_rank, found.cross_size, found.launcher) == (1, 2, name)
    assert found.job.startswith(f"{name}-10-77")
    assert len(found.key) == 32


def test_horovodrun_is_read() -> None:
    assert detect(HOROVODRUN) == World(3, 4, 1, 2, 1, 2, "box", "horovodrun", "j", b"\x00\xff")


@pytest.mark.parametrize("other", [OPENMPI, MPICH, TORCHRUN, SLURM], ids=["openmpi", "mpich", "torchrun", "slurm"])
def test_horovodrun_wins_over_an_outer_launcher(other: dict[str, str]) -> None:
    assert detect({**other, **HOROVODRUN}) == detect(HOROVODRUN)


def test_ranks_of_one_job_agree_and_jobs_differ(table: ProcessTable) -> None:
    first = detect({**OPENMPI, "OMPI_COMM_WORLD_RANK": "0"}, proc=table.root, pid=20)
    behind_shell = detect({**OPENMPI, "OMPI_COMM_WORLD_RANK": "1"}, proc=table.root, pid=21)
    assert (first.job, first.key) == (behind_shell.job, behind_shell.key)
    table.add(40, 1, {}, start=78, auxv=b"other secret")
    table.add(41, 40, {"OMPI_COMM_WORLD_RANK": "0"})
    other = detect(OPENMPI, proc=table.root, pid=41)
    assert other.job != first.job
    assert other.key != first.key


def test_under_a_daemon_of_another_user_srun_leaves_the_key_to_be_vouched_for(table: ProcessTable) -> None:
    (table.root / "10" / "auxv").unlink()
    found = detect({**SLURM, "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "1"}, proc=table.root, pid=20)
    assert (found.key, found.meeting.run) == (b"", "slurm/9/0/1")
    assert found.job == "slurm-10-77-9-0"


def test_jobs_of_one_daemon_differ(table: ProcessTable) -> None:
    jobs = {detect({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": n}, proc=table.root, pid=20).job for n in ("0", "1")} | {
        detect({**TORCHRUN, "TORCHELASTIC_RUN_ID": "u"}, proc=table.root, pid=20).job
    }
    assert len(jobs) == 3


def test_a_key_set_by_hand_is_used(table: ProcessTable) -> None:
    found = detect({**OPENMPI, **GIVEN}, proc=table.root, pid=20)
    assert found.key == b"\x00\xff"
    assert found.job.startswith("openmpi-10"), "a job id left over from an outer job would be that of several jobs"


def test_unreadable_daemon_needs_a_key_by_hand(tmp_path: Path) -> None:
    with pytest.raises(InitError, match=r"HOROVOD_SECRET_KEY.*HOROVOD_JOB_ID"):
        detect(OPENMPI, proc=tmp_path, pid=20)
    found = detect({**OPENMPI, **GIVEN}, proc=tmp_path, pid=20)
    assert (found.job, found.key) == ("j", b"\x00\xff")


def test_a_step_of_slurm_is_known_by_its_number_where_the_key_is_given(tmp_path: Path) -> None:
    found = detect({**SLURM, "SLURM_STEP_ID": "3", **GIVEN}, proc=tmp_path, pid=20)
    assert (found.job, found.key) == ("slurm-9-3", b"\x00\xff")


def test_one_rank_needs_no_key(tmp_path: Path) -> None:
    environ = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert detect(environ, proc=tmp_path, pid=20) == replace(ALONE, launcher="openmpi")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"HOROVOD_RANK": "0"}, r"HOROVOD_RANK='0' is set but HOROVOD_SIZE is not"),
        ({"HOROVOD_SIZE": "2"}, r"HOROVOD_SIZE='2' is set but HOROVOD_RANK is not"),
        ({"PMI_SIZE": "2"}, r"PMI_SIZE='2' is set but PMI_RANK is not"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, r"OMPI_COMM_WORLD_SIZE is not"),
        ({"LOCAL_WORLD_SIZE": "1"}, r"RANK and WORLD_SIZE are not"),
        ({**HOROVODRUN, "HOROVOD_RANK": "4"}, r"HOROVOD_RANK=4 must be .* less than HOROVOD_SIZE=4"),
        ({**HOROVODRUN, "HOROVOD_RANK": "-1"}, r"HOROVOD_RANK=-1"),
        ({**HOROVODRUN, "HOROVOD_RANK": "one"}, r"HOROVOD_RANK must be a whole number; received 'one'"),
        ({**HOROVODRUN, "HOROVOD_LOCAL_SIZE": "5"}, r"HOROVOD_LOCAL_SIZE=5 is more than HOROVOD_SIZE=4"),
        ({**HOROVODRUN, "HOROVOD_SECRET_KEY": "xyz"}, r"HOROVOD_SECRET_KEY must be hexadecimal"),
        ({**HOROVODRUN, "HOROVOD_SECRET_KEY": " \n"}, r"HOROVOD_SECRET_KEY must be hexadecimal"),
        ({k: v for k, v in HOROVODRUN.items() if k != "HOROVOD_LOCAL_SIZE"}, r"HOROVOD_LOCAL_SIZE is not"),
        ({k: v for k, v in HOROVODRUN.items() if k != "HOROVOD_CROSS_RANK"}, r"HOROVOD_CROSS_RANK is not"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "many"}, r"SLURM_STEP_TASKS_PER_NODE='many'"),
        ({**SLURM, "SLURM_LOCALID": "2"}, r"SLURM_LOCALID='2'"),
        ({**HOROVODRUN, "HOROVOD_MEETING": "10.0.0.1:5"}, r"HOROVOD_MEETING must be tcp://.*received '10.0.0.1:5'"),
        ({**ALPS_BY_HAND, "HOROVOD_LOCAL_SIZE": "none"}, r"HOROVOD_LOCAL_SIZE must be a whole number"),
    ],
)
def test_contradictions_are_errors(environ: dict[str, str], said: str) -> None:
    with pytest.raises(InitError, match=said):
        detect(environ)


@pytest.mark.parametrize(
    "environ", [{"RANK": "7"}, {"LOCAL_RANK": "0"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}], ids=str
)
def test_what_is_no_launcher_is_not_taken_for_one(environ: dict[str, str]) -> None:
    assert detect(environ) == ALONE


def test_the_key_is_never_shown() -> None:
    assert "ff" not in repr(detect(HOROVODRUN)).replace("HOROVOD", "")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (HOROVODRUN, Meeting("", (), "", True)),
        (
            {**HOROVODRUN, "HOROVOD_MEETING": "tcp://10.0.0.1:5, tcp://[fd00::1]:5"},
            Meeting("addresses", ("tcp://10.0.0.1:5", "tcp://[fd00::1]:5"), "", True),
        ),
        (OPENMPI, Meeting("mpi")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Meeting("mpi", is_place_known=False)),
        (ALPS_BY_HAND, Meeting("mpi")),
        (TORCHRUN, Meeting("", (), "torchrun/t/")),
        (
            {**TORCHRUN, "MASTER_ADDR": "node1", "MASTER_PORT": "29500", **GIVEN},
            Meeting("hosts", ("node1",), "torchrun/t/29500", True),
        ),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[1-2]", **GIVEN}, Meeting("hosts", ("n1", "n2"), "slurm/9/", True)),
    ],
    ids=["none", "horovodrun", "mpirun", "no local rank", "aprun", "torchrun alone", "torchrun", "srun"],
)
def test_how_ranks_of_several_hosts_find_each_other(
    environ: dict[str, str], expected: Meeting, table: ProcessTable
) -> None:
    assert detect(environ, proc=table.root, pid=20).meeting == expected


def test_tasks_of_srun_on_uneven_nodes_have_their_cross_ranks(table: ProcessTable) -> None:
    uneven = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2,1,3", "SLURM_STEP_NUM_TASKS": "6"}
    for rank, node, local, cross in ((0, 0, 0, (0, 3)), (1, 0, 1, (0, 2)), (4, 2, 1, (1, 2)), (5, 2, 2, (0, 1))):
        place = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
        found = detect({**uneven, **place}, proc=table.root, pid=20)
        assert (found.local_rank, found.cross_rank, found.cross_size) == (local, *cross)


def test_aprun_with_the_last_node_half_full(table: ProcessTable) -> None:
    found = detect(
        {**ALPS, "ALPS_APP_PE": "6", "HOROVOD_SIZE": "7", "HOROVOD_LOCAL_SIZE": "3"}, proc=table.root, pid=20
    )
    assert (found.rank, found.size, found.local_rank, found.local_size) == (6, 7, 0, 1)


def test_a_login_node_where_nothing_may_run_is_an_error(tmp_path: Path, table: ProcessTable) -> None:
    (tmp_path / "aprun").write_text("#!/bin/sh\n")
    (tmp_path / "aprun").chmod(0o755)
    path = {"PATH": f"/bin:{tmp_path}"}
    with pytest.raises(InitError, match=r"login node.*nothing may run.*aprun -n 8 -N 4 python train.py"):
        detect(path)
    assert detect({**path, **ALPS_BY_HAND}, proc=table.root, pid=20).launcher == "alps"
    assert detect({**path, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}).size == 1


SHOW = """
import os
from horovod.world import detect
w = detect()
line = [w.rank, w.size, w.local_rank, w.local_size, w.cross_rank, w.cross_size, w.launcher, w.job, w.key.hex()]
os.write(1, ("W " + " ".join(map(str, line)) + "\\n").encode())
"""


def worlds(command: list[str] | str, folder: Path, size: int, launcher: str) -> set[tuple[str, str]]:
    """Run the command, check the ranks, and give back the job ids and keys they saw."""
    code, output = run(command, folder)
    assert code == 0, output
    lines = [line.split() for line in re.findall(r"W (.*)", output)]
    expected = [[str(r), str(size), str(r), str(size), "0", "1", launcher] for r in range(size)]
    assert sorted(line[:7] for line in lines) == expected, output
    return {(line[7], line[8]) for line in lines}


FOUR = World(2, 4, 2, 4, 0, 1, "box", "horovodrun", "j", b"k")
TWO_HOSTS = replace(FOUR, local_rank=0, local_size=2, cross_rank=1, cross_size=2)


@pytest.mark.parametrize(
    ("world", "ranks", "expected"),
    [
        (FOUR, [0, 1, 2, 3], FOUR),
        (FOUR, [3, 2], replace(FOUR, rank=1, size=2, local_rank=1, local_size=2, job="j#3,2")),
        (FOUR, [2], replace(FOUR, rank=0, size=1, local_rank=0, local_size=1, job="")),
        # Some launchers number the ranks of a host in another order.
        (replace(FOUR, local_rank=0), [0, 2], replace(FOUR, rank=1, size=2, local_rank=1, local_size=2, job="j#0,2")),
        (
            TWO_HOSTS,
            [1, 2, 3],
            replace(TWO_HOSTS, rank=1, size=3, local_rank=0, local_size=2, cross_rank=1, cross_size=2, job="j#1,2,3"),
        ),
        # Only the second host has a second rank.
        (
            TWO_HOSTS,
            [3, 2, 1],
            replace(TWO_HOSTS, rank=1, size=3, local_rank=1, cross_rank=0, cross_size=1, job="j#3,2,1"),
        ),
    ],
)
def test_a_part_of_a_job(world: World, ranks: list[int], expected: World) -> None:
    assert part_of(world, ranks) == expected


@pytest.mark.parametrize("ranks", [[0, 1], [2, 4], [2, 2], [-1, 2], []])
def test_a_part_that_cannot_be(ranks: list[int]) -> None:
    with pytest.raises(ValueError, match="comm="):
        part_of(FOUR, ranks)


def test_a_part_of_tasks_that_srun_numbers_across_nodes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing tells a task which other ranks share its node, so ranks would wait for each other for ever."""
    world = World(0, 4, 0, 2, 0, 2, "n1", "slurm", "slurm-7-0", b"key")
    monkeypatch.setenv("SLURM_DISTRIBUTION", "cyclic:block")
    with pytest.raises(ValueError, match=r"comm=\[0, 2\] needs .* SLURM_DISTRIBUTION=cyclic:block; .*block"):
        part_of(world, [0, 2])
    monkeypatch.setenv("SLURM_DISTRIBUTION", "block")
    assert part_of(world, [0, 2]).local_size == 1


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "show.py"
    path.write_text(SHOW)
    return str(path)


@pytest.mark.parametrize("shell", [False, True], ids=["plain", "behind a shell"])
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.mpi(k)) for k in ("openmpi", "mpich")])
def test_under_mpirun(kind: str, shell: bool, mpirun: list[str], script: str, tmp_path: Path) -> None:
    rank = ["bash", "-c", f"{sys.executable} {script}; true"] if shell else [sys.executable, script]
    once = worlds([*mpirun, "-n", "2", *rank], tmp_path, 2, kind)
    again = worlds([*mpirun, "-n", "2", *rank], tmp_path, 2, kind)
    assert len(once) == len(again) == 1
    assert len(once | again) == 2


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torchrun comes with torch")
def test_under_torchrun(script: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", script]
    assert len(worlds(command, tmp_path, 2, "torchrun")) == 1


def test_under_horovodrun(script: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "horovod.launch.cli", "-np", "2", sys.executable, script]
    assert len(worlds(command, tmp_path, 2, "horovodrun")) == 1


def test_ranks_started_by_hand_from_one_shell(script: str, tmp_path: Path) -> None:
    loop = f"for r in 0 1; do HOROVOD_RANK=$r HOROVOD_SIZE=2 {sys.executable} {script} & done; wait"
    assert len(worlds(loop, tmp_path, 2, "horovodrun")) == 1
