"""poprun over several hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import run
from namespaces import Cluster

pytestmark = pytest.mark.slow

TRAIN = """
import os
import numpy, popdist, popdist.poptorch, poptorch, torch

class Net(torch.nn.Linear):
    def forward(self, x):
        return poptorch.identity_loss(super().forward(x), "mean")

popdist.init()
net = Net(1, 1, bias=False)
torch.nn.init.zeros_(net.weight)
model = poptorch.trainingModel(net, popdist.poptorch.Options(), poptorch.optim.SGD(net.parameters(), lr=1.0))
first = popdist.getReplicaIndexOffset()
model(torch.tensor([[first + 1.0], [first + 2.0]]))
total = popdist.allReduceSum(numpy.array([float(popdist.getInstanceIndex())]))
only = popdist.execute_on_instances({0}, lambda: "only here")
place = popdist.getInstanceIndex(), popdist.getNumInstances(), popdist.getLocalInstanceIndex(), first, os.environ["A"]
print(os.uname().nodename, *place, "weight", net.weight.item(), "sum", total[0], only, flush=True)
"""


def test_instances_of_several_hosts_know_their_place_and_train_together(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    poprun = cluster.machines["login"].command(sys.executable, "-m", "poprun")
    flags = ["--host=a,b", "--num-replicas=6", "--num-instances=3", "--mpi-local-args=-x A=1"]
    code, output = run([*poprun, *flags, sys.executable, str(script)], tmp_path, OMP_NUM_THREADS="1")
    assert (code, "--num-instances=3 cannot be divided evenly among 2 hosts" in output) == (2, True)
    flags = ["--host=a,b", "--num-replicas=4", "--mpi-local-args=-x A=1"]
    code, output = run([*poprun, *flags, sys.executable, str(script)], tmp_path, OMP_NUM_THREADS="1")
    assert code == 0, output
    # The mean over four replicas of x = 1, 2, 3, 4; a sum over two instances.
    assert sorted(output.splitlines()) == [
        "[1,0]<stdout>:a 0 2 0 0 1 weight -2.5 sum 1.0 only here",
        "[1,1]<stdout>:b 1 2 0 2 1 weight -2.5 sum 1.0 None",
    ]
