"""Which ranks a launcher still runs, from made-up process tables."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from horovod.rendezvous.endings import Siblings
from horovod.world import ON_HOST, Meeting, World

DAEMON = 10


class Table:
    """A /proc with a launcher's process and its ranks, of which this process is one, and a clock."""

    def __init__(self, root: Path, variable: str) -> None:
        self.root, self.variable, self.now_s = root, variable, 1000.0
        self.add(DAEMON, 1, "")

    def add(self, pid: int, parent: int, environ: str, state: str = "S") -> None:
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "stat").write_text(f"{pid} (a (b) c) {state} {parent} {' '.join(['0'] * 17)} 77 0 0\n")
        (folder / "environ").write_bytes(f"HOME=/\0{environ}\0".encode())
        (folder / "cmdline").write_bytes(b"")

    def rank(self, pid: int, rank: int, parent: int = DAEMON) -> None:
        self.add(pid, parent, f"{self.variable}={rank}")

    def end(self, pid: int) -> None:
        shutil.rmtree(self.root / str(pid))

    def siblings(self, launcher: str = "openmpi", job: str = "job", own: str = "0") -> Siblings:
        self.add(os.getpid(), DAEMON, f"{self.variable}={own}")
        world = World(0, 3, 0, 3, 0, 1, "host", launcher, job, b"key")
        return Siblings(world, self.root, lambda: self.now_s)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path, "OMPI_COMM_WORLD_RANK")


def test_a_rank_that_was_there_and_is_not_any_more_has_ended(table: Table) -> None:
    table.rank(21, 1)
    table.add(30, DAEMON, "")  # a wrapper that the launcher has given no number
    table.rank(32, 2, parent=30)
    found = table.siblings()
    assert [found.fate(rank) for rank in (1, 2)] == ["", ""]
    table.end(21)
    table.now_s += 0.5
    assert found.fate(1) == "", "it may be in the middle of execve(2)"
    table.now_s += 1.0
    assert found.fate(1) == "rank 1 (pid 21) has ended"
    assert found.fate(2) == ""
    table.add(32, 30, "OMPI_COMM_WORLD_RANK=2", state="Z")
    table.now_s += 0.5
    assert found.fate(2) == ""
    table.now_s += 1.0
    assert found.fate(2) == "rank 2 (pid 32) has ended"


def test_a_rank_that_comes_back_has_not_ended(table: Table) -> None:
    table.rank(21, 1)
    found = table.siblings()
    for pid in (21, 22, 23):
        assert found.fate(1) == ""
        table.end(pid)
        table.now_s += 0.7
        assert found.fate(1) == ""
        table.rank(pid + 1, 1)
        table.now_s += 0.7
    assert found.fate(1) == ""


def test_a_rank_that_never_was_there_has_ended_but_not_at_once(table: Table) -> None:
    found = table.siblings()
    for _ in range(4):
        assert found.fate(1) == ""
        table.now_s += 0.49
    assert found.fate(1) == ("rank 1 has ended, for openmpi runs no process with OMPI_COMM_WORLD_RANK=1 on this host,")
    table.rank(21, 1)  # after all
    table.now_s += 1.0
    assert found.fate(1) == ""


def test_a_rank_that_never_was_there_has_ended_sooner_where_the_next_one_is(table: Table) -> None:
    table.rank(22, 2)
    found = table.siblings()
    assert found.fate(1) == ""
    table.now_s += 1.0
    assert found.fate(1).startswith("rank 1 has ended, for openmpi runs no process with ")


def test_time_in_which_nothing_ran_is_no_sign_of_an_end(table: Table) -> None:
    found = table.siblings()
    assert found.fate(1) == ""
    table.now_s += 60
    assert found.fate(1) == ""


def test_where_each_rank_may_have_a_launcher_of_its_own_nobody_is_missed(table: Table) -> None:
    table.rank(21, 1)
    table.add(os.getpid(), 11, "OMPI_COMM_WORLD_RANK=0")
    table.add(11, 1, "")
    world = World(0, 3, 0, 3, 0, 1, "host", "openmpi", "job", b"key", Meeting(has_key=True))
    found = Siblings(world, table.root, lambda: table.now_s)
    for _ in range(6):
        assert [found.fate(rank) for rank in (1, 2)] == ["", ""]
        table.now_s += 6.0


@pytest.mark.parametrize(
    ("launcher", "variable", "line", "is_missed"),
    [
        ("slurm", "SLURM_LOCALID", b"slurmstepd: [42.0]\0", True),
        ("torchrun", "LOCAL_RANK", b"/usr/bin/python\0/opt/bin/torchrun\0--nnodes\x002\0", True),
        ("torchrun", "LOCAL_RANK", b"python\0-m\0torch.distributed.run\0", True),
        ("torchrun", "LOCAL_RANK", b"bash\0torchrun.sh\0", False),
        ("slurm", "SLURM_LOCALID", b"sh\0-c\0python train.py\0", False),
    ],
)
def test_what_starts_all_ranks_of_a_host_is_known_where_they_have_a_key_of_their_own(
    tmp_path: Path, launcher: str, variable: str, line: bytes, is_missed: bool
) -> None:
    table = Table(tmp_path, variable)
    (tmp_path / str(DAEMON) / "cmdline").write_bytes(line)
    table.add(os.getpid(), DAEMON, f"{variable}=0")
    world = World(0, 2, 0, 2, 0, 2, "host", launcher, f"job{ON_HOST}a", b"key", Meeting(has_key=True))
    found = Siblings(world, tmp_path, lambda: table.now_s)
    for _ in range(5):
        assert found.fate(1) == ""
        table.now_s += 0.5
        if is_missed and table.now_s >= 1002.0:
            break
    assert bool(found.fate(1)) is is_missed


@pytest.mark.parametrize(
    ("launcher", "variable", "job", "own", "is_known"),
    [
        ("torchrun", "RANK", "job", "0", True),
        ("torchrun", "LOCAL_RANK", f"job{ON_HOST}a", "0", True),
        ("slurm", "SLURM_LOCALID", f"job{ON_HOST}a", "0", True),
        ("mpich", "PMI_RANK", f"job{ON_HOST}a", "0", False),
        ("openmpi", "OMPI_COMM_WORLD_RANK", "job#0,2", "0", False),
        ("openmpi", "OMPI_COMM_WORLD_RANK", "job", "7", False),
        ("horovodrun", "HOROVOD_RANK", "job", "0", False),
    ],
    ids=["one host", "of several", "slurm", "no local rank", "a part of a job", "another number", "horovodrun"],
)
def test_where_numbers_tell_who_is_who(
    tmp_path: Path, launcher: str, variable: str, job: str, own: str, is_known: bool
) -> None:
    table = Table(tmp_path, variable)
    # The launcher's process is found by the variable of ranks, whatever tells local ranks.
    found = table.siblings(launcher, job, own)
    for _ in range(4):
        assert found.fate(1) == ""
        table.now_s += 1.0
    assert bool(found.fate(1)) is is_known
