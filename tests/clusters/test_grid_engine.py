"""A real Grid Engine of two nodes: a job script calls ``horovodrun``, whose agents ``qrsh -inherit`` starts."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grid_engine
import pytest
from grid_engine import GridEngine
from namespaces import Cluster
from sources import ROOT

TRAIN = """
import os
import horovod.numpy as hvd
import numpy as np
hvd.init()
total = hvd.allreduce(np.full(3, hvd.rank() + 1.0), op=hvd.Sum)
place = f"{hvd.local_rank()} of {hvd.local_size()} on {os.uname().nodename}"
print(f"rank {hvd.rank()} of {hvd.size()}, {place}: {total.tolist()}\\n", end="", flush=True)
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


def test_a_job_script_with_horovodrun_takes_hosts_and_slots(engine: GridEngine, tmp_path: Path) -> None:
    """The script is that of docs/clusters/grid_engine.md, with fewer slots."""
    (tmp_path / "train.py").write_text(TRAIN)
    page = (ROOT / "docs" / "clusters" / "grid_engine.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    script, out, err = (tmp_path / name for name in ("job.sh", "out", "err"))
    script.write_text(text)
    words = ["qsub", "-sync", "y", "-V", "-pe", "mpi", "3", "-o", str(out), "-e", str(err), "job.sh"]
    path = os.pathsep.join([str(Path(sys.executable).parent), engine.environ["PATH"]])
    ended = engine.run("env", f"--chdir={tmp_path}", *words, check=False, PATH=path)
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
