"""poprun over several hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import run
from namespaces import Cluster

pytestmark = pytest.mark.slow


def test_instances_of_several_hosts_know_their_place(cluster: Cluster, tmp_path: Path) -> None:
    program = (
        "import os, popdist as p; print(os.uname().nodename, p.getInstanceIndex(), p.getNumInstances(), "
        "p.getLocalInstanceIndex(), p.getReplicaIndexOffset(), os.environ['A'])"
    )
    flags = ["--host", "a,b", "--num-replicas=8", "--num-instances=4", "--mpi-local-args=-x A=1"]
    poprun = cluster.machines["login"].command(sys.executable, "-m", "poprun")
    code, output = run([*poprun, *flags, sys.executable, "-c", program], tmp_path, OMP_NUM_THREADS="1")
    assert code == 0, output
    assert sorted(output.splitlines()) == [
        "[1,0]<stdout>:a 0 4 0 0 1",
        "[1,1]<stdout>:a 1 4 1 2 1",
        "[1,2]<stdout>:b 2 4 0 4 1",
        "[1,3]<stdout>:b 3 4 1 6 1",
    ]
