"""Elastic jobs under torchrun: its agent ends the ranks of the host that has lost one, and those of others go on."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

from ports import held_port

TRAIN = """
import os, signal
import numpy as np
import horovod.numpy as hvd
hvd.init()
state = hvd.elastic.NumpyState(w=np.zeros(3))

@hvd.elastic.step
def one_step(state):
    total = hvd.allreduce(np.full(3, hvd.rank() + 1.0), op=hvd.Sum, name="step")
    if os.environ["RANK"] == "3" and state.progress == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    state.w += hvd.allreduce(total, op=hvd.Average, name="average")

@hvd.elastic.run
def train(state):
    while hvd.size() > 2:  # one of this host leaves at SIGTERM, at any step
        one_step(state)
    state.w[:] = 0
    for _ in range(10):
        one_step(state)

train(state)
print(f"rank {hvd.rank()} of {hvd.size()}: {state.w.tolist()}\\n", end="", flush=True)
"""


def test_ranks_of_other_hosts_go_on(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    environ = {
        **os.environ,
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_SECRET_KEY": secrets.token_hex(32),
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    agents = []
    with held_port() as port:
        words += ["--master-addr=127.0.0.1", f"--master-port={port}"]
        for node in (0, 1):
            with (tmp_path / f"err.{node}").open("w") as err:
                command = [*words, f"--node-rank={node}", str(script)]
                agents.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True, env=environ))
        lines = sorted(itertools.islice(agents[0].stdout, 2))
        agents[0].terminate()  # it would wait 300 s for the other agent
        for agent in agents:
            agent.communicate(timeout=240)
    said = [(tmp_path / f"err.{node}").read_text() for node in (0, 1)]
    assert lines == [f"rank {rank} of 2: {[30.0] * 3}\n" for rank in (0, 1)], said
    assert agents[1].returncode == 1
    lost = r"^horovod: rank 3 \(pid \d+ on \S+\) was killed by a signal, or has crashed;"
    assert re.search(lost, said[0], re.MULTILINE), said
