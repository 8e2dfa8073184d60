"""A real Grid Engine of two nodes: a job script calls ``horovodrun``, whose agents ``qrsh -inherit`` starts."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grid_engine
import pytest
from grid_engine import GridEngine
from namespaces import Cluster
from sources import ROOT

PAGE = (ROOT / "docs" / "clusters" / "grid_engine.md").read_text(encoding="utf-8")
TRAIN = """
import os
import horovod.numpy as hvd
import numpy as np
hvd.init()
total = hvd.allreduce(np.full(3, hvd.rank() + 1.0), op=hvd.Sum)
place = f"{hvd.local_rank()} of {hvd.local_size()} on {os.uname().nodename}"
print(f"rank {hvd.rank()} of {hvd.size()}, {place}: {total.tolist()}\\n", end="", flush=True)
"""
#: Ends at SIGUSR2, which ranks may get one after the other.
NOTIFIED = """
import signal
import horovod.numpy as hvd
import numpy as np
noticed = []
signal.signal(signal.SIGUSR2, lambda *_: noticed.append("told"))
hvd.init()
print(f"up {hvd.rank()}\\n", end="", flush=True)
while hvd.allreduce(np.array([len(noticed)]), op=hvd.Sum, name="told")[0] < 3:
    pass
print(f"{noticed} {hvd.rank()}\\n", end="", flush=True)
"""


@pytest.fixture
def engine() -> Iterator[GridEngine]:
    if reason := grid_engine.why_not():
        if os.environ.get("HOROVOD_TEST_CLUSTERS"):
            pytest.fail(reason)
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="horovod-sge-") as name:
        for folder in ("hosts", "engine"):
            (Path(name) / folder).mkdir()
        with Cluster(Path(name) / "hosts") as cluster, GridEngine(cluster, Path(name) / "engine") as found:
            yield found


def submitted(engine: GridEngine, folder: Path, text: str, *words: str, check: bool = True) -> Any:
    """Submit a script for three ranks, whose output goes to the files ``out`` and ``err``."""
    (folder / "job.sh").write_text(text)
    words = ("qsub", *words, "-V", "-pe", "mpi", "3", "-o", str(folder / "out"), "-e", str(folder / "err"), "job.sh")
    path = os.pathsep.join([str(Path(sys.executable).parent), engine.environ["PATH"]])
    return engine.run("env", f"--chdir={folder}", *words, check=check, PATH=path)


def test_a_job_script_with_horovodrun_takes_hosts_and_slots(engine: GridEngine, tmp_path: Path) -> None:
    """The script is that of docs/clusters/grid_engine.md, with fewer slots."""
    (tmp_path / "train.py").write_text(TRAIN)
    (text,) = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    out, err = tmp_path / "out", tmp_path / "err"
    ended = submitted(engine, tmp_path, text, "-sync", "y", check=False)
    said = err.read_text() if err.exists() else ""
    assert ended.returncode == 0, f"{ended.stdout}{ended.stderr}{said}{engine.logs()}"
    first, second = ("a", "b") if "Grid Engine: a:2,b:1" in said else ("b", "a")
    assert f"horovodrun: hosts from Grid Engine: {first}:2,{second}:1" in said
    lines = sorted(line.partition(">:")[2] for line in out.read_text().splitlines())
    assert lines == [
        f"rank 0 of 3, 0 of 2 on {first}: [6.0, 6.0, 6.0]",
        f"rank 1 of 3, 1 of 2 on {first}: [6.0, 6.0, 6.0]",
        f"rank 2 of 3, 0 of 1 on {second}: [6.0, 6.0, 6.0]",
    ]


def test_ranks_get_the_signal_of_notify_before_their_job_is_deleted(engine: GridEngine, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NOTIFIED)
    (line,) = re.findall(r"`(exec horovodrun [^`]*)`", PAGE)
    job = submitted(engine, tmp_path, f"#!/bin/sh\n#$ -cwd\n{line}\n", "-terse", "-notify").stdout.strip()
    out = tmp_path / "out"
    while not out.exists() or out.read_text().count("up ") < 3:
        engine.run("qstat", "-j", job)  # fails when the job is over
    engine.run("qdel", job)
    while engine.run("qstat", "-j", job, check=False).returncode == 0:
        pass
    lines = sorted(line.partition(">:")[2] for line in out.read_text().splitlines() if "told" in line)
    assert lines == [f"['told'] {rank}" for rank in range(3)], (tmp_path / "err").read_text()
