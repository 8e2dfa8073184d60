"""TensorFlow's own MultiWorkerMirroredStrategy, ring, as a peer: each rank directs a worker process of its own.

It must be set up before anything else of TensorFlow's in its process, and keeps that process's devices for itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from horovod.bench.cases import Case
from horovod.bench.control import Agreement, Contender, WrongResultError
from horovod.bench.stats import mean_of_ranks
from horovod.bench.stepping import Arm, Array

__all__ = ["Mwms", "mwms_arm"]


class _Worker:
    """The worker process of this rank; all ranks make and use theirs together."""

    def __init__(self, control: Agreement) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            places = control.gather(f"127.0.0.1:{free.getsockname()[1]}")
        cluster = {"cluster": {"worker": places}, "task": {"type": "worker", "index": control.rank}}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.mwms_worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env={**environment, "TF_CONFIG": json.dumps(cluster)}, text=True,
        )  # fmt: skip

    def ask(self, **command: Any) -> dict[str, Any]:
        """Have a command carried out."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker of MultiWorkerMirroredStrategy ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


class Mwms(Contender):
    """The contender for allreduce, in a function."""

    name = "mwms ring"

    def __init__(self, control: Agreement) -> None:
        self._control = control
        self._worker = _Worker(control)

    def why_not(self, case: Case) -> str:
        """Only allreduce."""
        return "" if case.op == "allreduce" else "only allreduce is compared between frameworks"

    def prepare(self, case: Case) -> None:
        size = self._control.size
        answer = self._worker.ask(do="prepare", count=case.count(size), dtype=case.dtype)
        if answer["value"] != size * (size + 1) // 2:
            raise WrongResultError(f"{self.name}: {dataclasses.asdict(case)} gave {answer['value']}")

    def measure(self, calls: int) -> list[float]:
        self._control.barrier()
        return mean_of_ranks(self._control.gather(self._worker.ask(do="measure", calls=calls)["times"]))

    def release(self) -> None:
        self._worker.ask(do="release")

    def close(self) -> None:
        self._worker.close()


def mwms_arm(control: Agreement, name: str, tiny: bool, base: str = "") -> Arm:
    """Train a model with the strategy in the worker of this rank.

    Args:
        control: how the ranks agree.
        name: of the model.
        tiny: whether it is of smoke size.
        base: the arm that it is compared with.
    """
    worker = _Worker(control)
    worker.ask(do="model", name=name, rank=control.rank, tiny=tiny)

    def weights() -> Array:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "weights.npy"
            worker.ask(do="weights", path=str(path))
            found: Array = np.load(path)
            return found

    def step() -> None:
        worker.ask(do="step")

    return Arm("mwms", step, weights, worker.close, base=base)
