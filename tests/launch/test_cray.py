"""Cray's launchers: stand-ins that start real ranks with the variables of the real ones, and what login nodes say.

The variables are those of aprun(1) (ALPS) and mpiexec(1) (PALS); see ``horovod.launchers``.
"""

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
total = hvd.allreduce(np.full(3, hvd.rank() + 1.0), op=hvd.Sum)
place = f"rank {hvd.rank()} of {hvd.size()}, {hvd.local_rank()} of {hvd.local_size()}"
print(f"{place}: {total.tolist()}\\n", end="", flush=True)
"""
#: Starts ranks on this machine as the real one does on compute nodes: -n how many, -N how many to a node.
STAND_IN = f"""#!{sys.executable}
import os, subprocess, sys
words, count, given = sys.argv[1:], 1, {{}}
while words[0].startswith("-"):
    flag, value = words.pop(0), words.pop(0)
    if flag in ("-n",):
        count = int(value)
    elif flag in ("-e", "--env"):
        name, _, text = value.partition("=")
        given[name] = text
ranks = []
for rank in range(count):
    own = {{"ALPS_APP_PE": rank, "ALPS_APP_DEPTH": 1, "ALPS_APP_ID": 4711}}
    if os.path.basename(sys.argv[0]) == "mpiexec":
        own = {{
            "PALS_RANKID": rank, "PALS_LOCAL_RANKID": rank, "PALS_NODEID": 0, "PALS_APID": "ab-cd", "PALS_DEPTH": 1,
            "PMI_RANK": rank, "PMI_SIZE": count, "PMI_LOCAL_RANK": rank, "PMI_LOCAL_SIZE": count,
        }}
    own = {{name: str(value) for name, value in own.items()}}
    ranks.append(subprocess.Popen(words, env={{**os.environ, **given, **own}}))
sys.exit(max(rank.wait() for rank in ranks))
"""


def _put(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "command",
    [
        "aprun -n 2 -N 2 -e HOROVOD_TIMELINE={timeline}",
        "aprun -n 2 -N 2 -e HOROVOD_TIMELINE={timeline} -e HOROVOD_SIZE=2 -e HOROVOD_LOCAL_SIZE=2",
        "mpiexec -n 2 --ppn 2 --env HOROVOD_TIMELINE={timeline}",
    ],
    ids=["ALPS", "ALPS, sizes by hand", "PALS"],
)
def test_ranks_meet_and_reduce(command: str, tmp_path: Path) -> None:
    name, *words = command.format(timeline=tmp_path / "t.json").split()
    launcher = _put(tmp_path, name, STAND_IN)
    (tmp_path / "train.py").write_text(TRAIN)
    ended = subprocess.run(
        [launcher, *words, sys.executable, str(tmp_path / "train.py")],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"rank {r} of 2, {r} of 2: [3.0, 3.0, 3.0]" for r in (0, 1)]
    assert "allreduce" in (tmp_path / "t.json").read_text()


def test_on_a_login_node_horovodrun_says_what_to_type(tmp_path: Path) -> None:
    path = f"{tmp_path}:{os.environ['PATH']}"
    _put(tmp_path, "mpirun", "#!/bin/sh\necho 'PALS version 1.2.4'\n")
    ended = horovodrun("--mpi", "-np", "2", "-H", "localhost:1,nid1:1", "true", PATH=path)
    assert (
        ended.code,
        ended.err.count("login node, not a job of PBS: no rank may run here; submit the job with qsub"),
    ) == (1, 1)
    _put(tmp_path, "aprun", "#!/bin/sh\n")
    ended = horovodrun("-np", "2", "true", PATH=path)
    assert ended.code == 1
    assert "login node" in ended.err and "nothing may run" in ended.err and "aprun -n 8 -N 4" in ended.err
