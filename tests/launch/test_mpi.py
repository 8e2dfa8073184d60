"""The command lines of --mpi, as tables; the real mpirun over two hosts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from launching import HOROVODRUN, horovodrun
from namespaces import Cluster

from horovod.errors import InitError
from horovod.launch.hosts import HostSlots
from horovod.launch.mpi import MpiLauncher, command_line, recognize
from horovod.launch.ssh import Access
from horovod.rendezvous import mpi
from horovod.world import World

HOSTS = [HostSlots("a", 2), HostSlots("b", 2)]
ACCESS = Access("python", 2222, "/key", interfaces=("eth0", "ib0"))


@pytest.mark.parametrize(
    ("version", "kind", "major"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/", "openmpi", 5),
        ("mpirun (Open MPI) 4.1.4\n", "openmpi", 4),
        ("mpirun (IBM Spectrum MPI) 10.4.0.03rtm4\n", "spectrum", 10),
        ("HYDRA build details:\n    Version:        5.0.2\n", "mpich", 5),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307\n", "intel", 2021),
        ("PALS version 1.2.4\n", "cray", 1),
    ],
)
def test_an_mpirun_is_recognized(version: str, kind: str, major: int) -> None:
    assert recognize("mpirun", version) == MpiLauncher(kind, "mpirun", major)


def test_an_unknown_mpirun_is_an_error_that_quotes_it() -> None:
    with pytest.raises(ValueError, match="it prints 'SuperMPI 1'"):
        recognize("mpirun", "SuperMPI 1\nmore")


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        (
            MpiLauncher("openmpi", "mpirun", 5),
            "mpirun -np 4 --host a:2,b:2 --bind-to none --map-by slot --mca pml ob1 --mca btl tcp,self --prtemca "
            "plm_ssh_args|-p 2222 -i /key|--mca btl_tcp_if_include eth0,ib0 --prtemca prte_if_include eth0,ib0 "
            "-x PATH -x KEY",
        ),
        (
            MpiLauncher("openmpi", "mpirun", 4),
            "mpirun -np 4 --host a:2,b:2 --bind-to none --map-by slot --mca pml ob1 --mca btl tcp,self --mca "
            "plm_rsh_args|-p 2222 -i /key|--mca btl_tcp_if_include eth0,ib0 --mca oob_tcp_if_include eth0,ib0 "
            "-x PATH -x KEY",
        ),
        (MpiLauncher("mpich", "mpirun", 5), "mpirun -np 4 -hosts a:2,b:2 -bind-to none -iface eth0 -genvlist PATH,KEY"),
        (
            MpiLauncher("intel", "mpirun", 2021),
            "mpirun -np 4 -hosts a:2,b:2 -iface eth0 -genv FI_PROVIDER tcp -genvlist PATH,KEY",
        ),
        (MpiLauncher("cray", "mpiexec", 1), "mpiexec -n 4 --hosts a,b --ppn 2 --cpu-bind none --envlist PATH,KEY"),
        (MpiLauncher("jsrun", "jsrun"), "jsrun --nrs 4 --tasks_per_rs 1 --bind none"),
    ],
    ids=lambda value: f"{value.kind}{value.major}" if isinstance(value, MpiLauncher) else "",
)
def test_command_lines(launcher: MpiLauncher, expected: str) -> None:
    words = command_line(launcher, 4, HOSTS, ["python", "t.py"], ["PATH", "KEY"], ACCESS, mpi_args=["--more"], tcp=True)
    head, *rest = expected.split("|")
    wanted = head.split() + ([rest[0], *rest[1].split()] if rest else [])
    assert words == [*wanted, "--more", "python", "t.py"]


@pytest.mark.parametrize(
    ("kind", "names", "expected"),
    [
        ("mpich", ["localhost", "b"], "node:2,b:2"),
        ("intel", ["b", "127.0.0.1"], "b:2,node:2"),
        ("mpich", ["::1"], "localhost:2"),
        ("openmpi", ["localhost", "b"], "localhost:2,b:2"),
    ],
)
def test_hydra_is_told_what_other_hosts_call_this_one(kind: str, names: list[str], expected: str) -> None:
    hosts = [HostSlots(name, 2) for name in names]
    words = command_line(MpiLauncher(kind, "mpirun", 5), 4, hosts, ["x"], [], Access("python"), nodename="node")
    assert words[words.index("--host" if kind == "openmpi" else "-hosts") + 1] == expected


@pytest.mark.parametrize("kind", ["openmpi", "spectrum", "mpich", "intel"])
def test_an_address_that_mpirun_would_cut_in_two_is_an_error(kind: str) -> None:
    with pytest.raises(ValueError, match=r"-H \[fd00::2\]: mpirun takes no addresses of IPv6; give the host a name"):
        command_line(
            MpiLauncher(kind, "mpirun", 5), 2, [HostSlots("a", 1), HostSlots("fd00::2", 1)], ["x"], [], Access("python")
        )


def test_binding_flags_replace_ours() -> None:
    words = command_line(
        MpiLauncher("openmpi", "mpirun", 5), 2, [], ["x"], [], Access("python"), binding_args=["--bind-to", "core"]
    )
    assert words == ["mpirun", "-np", "2", "--bind-to", "core", "x"]


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        (MpiLauncher("openmpi", "mpirun", 5), ["--output", "dir=out"]),
        (MpiLauncher("openmpi", "mpirun", 4), ["--output-filename", "out"]),
        (
            MpiLauncher("mpich", "mpirun", 5),
            ["-outfile-pattern", "out/rank.%r.stdout", "-errfile-pattern", "out/rank.%r.stderr"],
        ),
    ],
    ids=["openmpi5", "openmpi4", "mpich"],
)
def test_output_goes_to_a_file_of_each_rank(launcher: MpiLauncher, expected: list[str]) -> None:
    words = command_line(launcher, 2, [], ["x"], [], Access("python"), output_dir="out")
    assert words[-len(expected) - 1 :] == [*expected, "x"]


def test_who_cannot_write_files_of_each_rank_says_so() -> None:
    with pytest.raises(ValueError, match="--output-filename: jsrun cannot be asked"):
        command_line(MpiLauncher("jsrun", "jsrun"), 2, [], ["x"], [], Access("python"), output_dir="out")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.mpi(kind)) for kind in ("openmpi", "mpich")])
def test_mpirun_starts_the_ranks_of_one_host_too(kind: str, mpirun: list[str], tmp_path: Path) -> None:
    path = f"{Path(mpirun[0]).parent}:{os.environ['PATH']}"
    show = f"echo ${'OMPI_COMM_WORLD_SIZE' if kind == 'openmpi' else 'PMI_SIZE'} ranks of $OMP_NUM_THREADS thread"
    ended = horovodrun("--mpi", "-np", "3", "--output-filename", "out", "sh", "-c", show, cwd=tmp_path, PATH=path)
    assert ended.code == 0, ended.err
    files = [file.read_text() for file in (tmp_path / "out").rglob("*stdout")]
    assert files == ["3 ranks of 1 thread\n"] * 3


def test_jsrun_does_not_share_out_the_cores_of_this_host(tmp_path: Path) -> None:
    jsrun = tmp_path / "jsrun"
    jsrun.write_text("#!/bin/sh\necho threads=$OMP_NUM_THREADS $*\n")
    jsrun.chmod(0o755)
    ended = horovodrun(
        "--jsrun", "-np", "2", "true", program=["env", "-u", "OMP_NUM_THREADS", *HOROVODRUN],
        PATH=f"{tmp_path}:{os.environ['PATH']}", LSB_JOBID="7",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert ended.lines == ["threads= --nrs 2 --tasks_per_rs 1 --bind none true"]


def test_without_mpirun_one_host_does_without_it(tmp_path: Path) -> None:
    echo = shutil.which("echo")
    (tmp_path / "echo").symlink_to(echo)
    ended = horovodrun("--mpi", "-np", "1", "echo", "here", PATH=str(tmp_path))
    assert (ended.code, ended.lines) == (0, ["here"])
    assert "--mpi ignored: single host, and mpirun not found in PATH" in ended.err


@pytest.mark.slow
@pytest.mark.mpi("openmpi")
def test_mpirun_starts_the_ranks_of_two_hosts(cluster: Cluster, mpirun: list[str]) -> None:
    show = 'echo "rank $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE on $(hostname) $MINE ${HOROVOD_SECRET_KEY:+key}"'
    ended = horovodrun(
        "--mpi", "--verbose", "-np", "2", "-H", "a:1,b:1", "sh", "-c", show,
        program=cluster.machines["login"].command(*HOROVODRUN),
        PATH=f"{Path(mpirun[0]).parent}:/usr/local/bin:/usr/bin:/bin", MINE="mine",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert sorted(ended.lines) == ["rank 0 of 2 on a mine key", "rank 1 of 2 on b mine key"]
    assert "ignored" not in ended.err
    assert "horovodrun: running " in ended.err and "-x HOROVOD_SECRET_KEY" in ended.err


def test_mpi4py_without_an_mpi_library_is_not_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(timeout_s: float) -> None:
        raise RuntimeError("cannot load MPI library")

    monkeypatch.setattr(mpi, "_start_mpi_within_horovod_start_timeout", start)
    with pytest.raises(InitError, match=r"mpi4py, which finds no MPI library; add the folder of libmpi\.so"):
        mpi.introduce(World(0, 2, 0, 1, 0, 2, "a", "mpirun", "j", b"k"), 1.0)
