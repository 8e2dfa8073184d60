"""A real Slurm of three nodes: ``srun``, ``sbatch`` and ``horovodrun``, with no key exported by anybody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from slurm import Slurm

TRAIN = """
import horovod.numpy as hvd
import numpy as np
hvd.init()
total = hvd.allreduce(np.full(3, hvd.rank() + 1.0), op=hvd.Sum)
place = f"{hvd.local_rank()} of {hvd.local_size()}, {hvd.cross_rank()} of {hvd.cross_size()}"
print(f"rank {hvd.rank()} of {hvd.size()}, {place}: {total.tolist()}\\n", end="", flush=True)
"""
#: Two ranks on the first node, one on the second.
UNEVEN = [
    "rank 0 of 3, 0 of 2, 0 of 2: [6.0, 6.0, 6.0]",
    "rank 1 of 3, 1 of 2, 0 of 1: [6.0, 6.0, 6.0]",
    "rank 2 of 3, 0 of 1, 1 of 2: [6.0, 6.0, 6.0]",
]


@pytest.fixture
def train(slurm: Slurm) -> str:
    path = slurm.folder / "train.py"
    path.write_text(TRAIN)
    return str(path)


def ranks(output: str) -> list[str]:
    """The lines of the ranks."""
    return sorted(line.partition(">:")[2] or line for line in output.splitlines() if "rank " in line and " of " in line)


@pytest.mark.parametrize("kind", ["none", "pmi2", "pmix", "cray_shasta"])
def test_srun_needs_no_key_whatever_pmi_it_brings(kind: str, slurm: Slurm, train: str, tmp_path: Path) -> None:
    if kind == "pmix" and not list(Path("/usr/lib").glob("*/libpmix.so")):
        pytest.skip("pmix needs libpmix.so, under this name, before slurmd starts: apt-get install libpmix-dev")
    ended = slurm.run("srun", f"--mpi={kind}", "-N2", "-n3", sys.executable, train, HOME=str(tmp_path))
    assert ranks(ended.stdout) == UNEVEN
    assert not list(tmp_path.iterdir()), "with MUNGE no file is needed"


def test_srun_of_a_heterogeneous_job(slurm: Slurm, train: str) -> None:
    ended = slurm.run("srun", "-N1", "-n1", sys.executable, train, ":", "-N2", "-n3", sys.executable, train)
    assert ranks(ended.stdout) == [
        "rank 0 of 4, 0 of 1, 0 of 3: [10.0, 10.0, 10.0]",
        "rank 1 of 4, 0 of 2, 1 of 3: [10.0, 10.0, 10.0]",
        "rank 2 of 4, 1 of 2, 0 of 1: [10.0, 10.0, 10.0]",
        "rank 3 of 4, 0 of 1, 2 of 3: [10.0, 10.0, 10.0]",
    ]


def test_a_heterogeneous_job_may_begin_on_a_later_node(slurm: Slurm, train: str) -> None:
    """Slurm lists the nodes in their own order."""
    ended = slurm.run("srun", "-n1", "-w", "b", sys.executable, train, ":", "-n3", "-w", "a,c", sys.executable, train)
    found = [line.partition(",")[0] for line in ranks(ended.stdout)]
    assert found == ["rank 0 of 4", "rank 1 of 4", "rank 2 of 4", "rank 3 of 4"], ended.stderr
    assert [line.split(": ")[1] for line in ranks(ended.stdout)] == ["[10.0, 10.0, 10.0]"] * 4
    assert [line.split()[4] for line in ranks(ended.stdout)] == ["0", "0", "1", "0"]


def cyclic(*sizes: int) -> list[str]:
    """The lines of ranks that are numbered across nodes with ``sizes`` tasks."""
    places = [(local, node) for local in range(max(sizes)) for node in range(len(sizes)) if local < sizes[node]]
    total = sum(range(1, len(places) + 1))
    lines = []
    for rank, (local, node) in enumerate(places):
        peers = [other for other, size in enumerate(sizes) if local < size]
        place = f"{local} of {sizes[node]}, {peers.index(node)} of {len(peers)}"
        lines.append(f"rank {rank} of {len(places)}, {place}: {[float(total)] * 3}")
    return lines


def test_tasks_that_are_numbered_across_nodes_and_a_second_job_beside_them(slurm: Slurm, train: str) -> None:
    words = ["srun", "-N2", "-n4", "-m", "cyclic", sys.executable, train]
    with slurm.start(*words) as other:
        found = [ranks(slurm.run(*words).stdout), ranks(other.communicate(timeout=300)[0])]
    # Slurm chooses how many of the four CPUs each node gives.
    assert [output in (cyclic(3, 1), cyclic(2, 2), cyclic(1, 3)) for output in found] == [True, True], found


def test_a_batch_script_runs_several_steps(slurm: Slurm, train: str, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    step = f"{sys.executable} {train}"
    # The second step has fewer tasks than the job, whose variables it inherits.
    script.write_text(f"#!/bin/sh\nsrun {step} && srun -N1 -n2 {step}\n")
    slurm.run("sbatch", "--wait", "-N2", "-n3", "--cpus-per-task=2", "-o", str(tmp_path / "out"), str(script))
    assert ranks((tmp_path / "out").read_text()) == sorted(
        [*UNEVEN, "rank 0 of 2, 0 of 2, 0 of 1: [3.0, 3.0, 3.0]", "rank 1 of 2, 1 of 2, 0 of 1: [3.0, 3.0, 3.0]"]
    )


NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


@pytest.fixture
def other_python() -> dict[str, str]:
    """Variables with which Debian's Python runs this project as another user, who cannot read root's home."""
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HOME": "/nonexistent", "OMP_NUM_THREADS": "1"}
    command = [*NOBODY, "/usr/bin/python3", "-c", "import horovod.numpy"]
    if subprocess.run(command, env=environ, cwd="/", capture_output=True).returncode:
        pytest.skip("another user has no Python here that can import this project")
    return environ


def test_another_user_than_slurms_needs_no_key_either(slurm: Slurm, train: str, other_python: dict[str, str]) -> None:
    """The daemon that starts the ranks is root's, so no secret can be drawn from it, not even on one node."""
    ended = slurm.run(*NOBODY, "srun", "-D", "/", "-N1", "-n2", "/usr/bin/python3", train, **other_python)
    assert ranks(ended.stdout) == [
        "rank 0 of 2, 0 of 2, 0 of 1: [3.0, 3.0, 3.0]",
        "rank 1 of 2, 1 of 2, 0 of 1: [3.0, 3.0, 3.0]",
    ]


def test_without_munge_the_key_is_a_file_of_this_user(slurm: Slurm, train: str, tmp_path: Path) -> None:
    hidden = f"umount -l /run/munge; exec {sys.executable} {train}"
    ended = slurm.run("srun", "-N2", "-n3", "unshare", "-m", "sh", "-c", hidden, HOME=str(tmp_path))
    assert ranks(ended.stdout) == UNEVEN
    assert [path.name for path in tmp_path.iterdir()] == [".horovod"]
    assert not list((tmp_path / ".horovod").iterdir()), "rank 0 removes the key at its end"


STRANGER = """
import socket, sys
from horovod.rendezvous import vouching
from horovod.rendezvous.munge import Munge, MungeError
munge, port = Munge(), int(sys.argv[1])
with socket.create_connection(("a", port)) as connection:
    credential = connection.recv(65536)
    try:
        print("read", munge.decode(credential))
    except MungeError as error:
        print("refused:", error)
print("taken:", vouching.take_by_munge(munge, "run", ["a"], 1))
"""
OFFER = """
import os, socket, subprocess, sys, threading
from horovod.rendezvous import vouching
from horovod.rendezvous.munge import Munge
munge = Munge()
first, second, *_ = vouching._ports("run", munge.uid)
squatter = socket.create_server(("", first))
def fool():
    while True:
        connection, _ = squatter.accept()
        connection.sendall(b"MUNGE:AwQFAACk:")
        connection.close()
threading.Thread(target=fool, daemon=True).start()
vouching.offer_by_munge(munge, vouching.Offer("run", b"k" * 32, []), 1, 60)
print(second, flush=True)
server = next(t for t in threading.enumerate() if t.name == "horovod-key")
server.join()
print("all have it")
"""


def test_strangers_read_no_key_and_cannot_pass_for_rank_0(slurm: Slurm, other_python: dict[str, str]) -> None:
    with slurm.start(sys.executable, "-c", OFFER, host="a") as offering:
        port = offering.stdout.readline().strip()
        said = slurm.run(*NOBODY, "/usr/bin/python3", "-c", STRANGER, port, host="b", **other_python).stdout
        assert said.startswith("refused: MUNGE: Unauthorized credential")
        assert "taken: None" in said
        said = slurm.run(sys.executable, "-c", STRANGER, port, host="b").stdout
        assert said.startswith("read Credential(")  # the same user; each host reads a credential once
        assert "taken: Offer(run='run', key=b'kkkk" in said
        assert offering.stdout.read() == "all have it\n"


HOROVODRUN = [sys.executable, "-m", "horovod.launch.cli"]


@pytest.mark.parametrize(
    ("asked", "given", "expected"),
    [
        (["-N2", "-n3"], [], UNEVEN),
        (["-N2", "-n2"], ["-np", "3"], UNEVEN),
        (["-N1", "-n2", ":", "-N1", "-n1"], [], UNEVEN),
    ],
    ids=["as many as tasks", "spread evenly", "heterogeneous"],
)
def test_horovodrun_takes_the_allocation_without_ssh(
    asked: list[str], given: list[str], expected: list[str], slurm: Slurm, train: str
) -> None:
    ended = slurm.run("salloc", *asked, *HOROVODRUN, *given, sys.executable, train, PATH=without_ssh(slurm))
    assert "horovodrun: hosts from Slurm: a:" in ended.stderr
    assert ranks(ended.stdout) == expected


def test_agents_of_a_batch_script_get_what_is_their_nodes(slurm: Slurm, tmp_path: Path) -> None:
    """Slurm would give an agent the GPU of one task. Labels of srun would mix with the frames of an agent."""
    command = "echo place $SLURMD_NODENAME $(hostname); scontrol show step $SLURM_JOB_ID.0 | grep TresPerNode"
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\n{' '.join(HOROVODRUN)} sh -c '{command}'\n")
    words = ["-N2", "-n4", "--ntasks-per-node=2", "--gpus-per-task=1", "-o", str(tmp_path / "out"), str(script)]
    slurm.run("sbatch", "--wait", *words, SLURM_LABELIO="1")
    lines = (tmp_path / "out").read_text().splitlines()
    places = sorted(line.split()[1:3] for line in lines if ">:place" in line)
    assert places == [["a", "a"], ["a", "a"], ["b", "b"], ["b", "b"]], lines
    assert sum("TresPerNode=gres:gpu:2" in line for line in lines) == 4, lines


def test_copies_of_horovodrun_that_srun_starts_end_at_once(slurm: Slurm) -> None:
    ended = slurm.run("srun", "-n2", *HOROVODRUN, "-np", "2", "true", check=False)
    assert ended.returncode == 2
    assert "srun has started 2 copies of horovodrun" in ended.stderr
    slurm.run("srun", "-n2", *HOROVODRUN, "-np", "1", "-H", "localhost:1", "true")  # two jobs, as the user says


def without_ssh(slurm: Slurm) -> str:
    """A PATH without ssh."""
    folder = slurm.folder / "bin"
    if not folder.exists():
        folder.mkdir()
        for place in ("/usr/bin", "/bin"):
            for program in Path(place).iterdir():
                if program.name != "ssh" and not (folder / program.name).exists():
                    (folder / program.name).symlink_to(program)
    return str(folder)


KILLED = """
import os, signal, sys
import horovod.numpy as hvd
import numpy as np
from horovod.errors import PeerLostError
hvd.init()
try:  # a killed process may take the last data that it has sent along
    hvd.allreduce(np.ones(2))
    if hvd.rank() == 2:
        sys.exit(3) if sys.argv[1] == "exits" else os.kill(os.getpid(), signal.SIGKILL)
    while True:
        hvd.allreduce(np.ones(2))
except PeerLostError as error:
    print(f"rank {hvd.rank()} lost rank {error.rank}\\n", end="", flush=True)
"""


@pytest.mark.parametrize(("how", "code"), [("is killed", 137), ("exits", 3)])
def test_a_task_that_ends_is_named_by_all_others(how: str, code: int, slurm: Slurm) -> None:
    ended = slurm.run("srun", "-N2", "-n3", sys.executable, "-c", KILLED, how, check=False)
    assert sorted(ended.stdout.splitlines()) == ["rank 0 lost rank 2", "rank 1 lost rank 2"], ended.stderr
    assert ended.returncode == code


def test_a_node_that_goes_down_is_named(own_slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import horovod.numpy as hvd, numpy as np\nhvd.init()\nprint('begun', flush=True)\n"
        "while True:\n    hvd.allreduce(np.ones(2))\n"
    )
    words = ["salloc", "--no-kill", "-N3", "-n3", *HOROVODRUN, sys.executable, str(script)]
    with own_slurm.start(*words, stderr=subprocess.STDOUT) as job:
        begun = 0
        while begun < 3:
            line = job.stdout.readline()
            assert line, "ended too soon"
            begun += "begun" in line
        own_slurm.crash("c")
        said = job.stdout.read()
    assert "rank 2 on c" in said
    assert job.returncode != 0
