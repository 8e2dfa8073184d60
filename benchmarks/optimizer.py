"""AdamW with its state on every rank, beside one whose state is shared, and beside torch's ZeRO.

horovodrun -np 2 python benchmarks/optimizer.py [MODEL]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

import horovod.torch as hvd
from horovod.bench.control import Agreement
from horovod.bench.gloo import start_gloo, stop_gloo
from horovod.bench.models import Task
from horovod.bench.on_torch import make_task, torch_arm, wrap_in_ddp
from horovod.bench.stepping import Arm, run_train

#: With this eps a gradient that is all rounding moves nothing, so that all arms can be compared.
_OPTIONS: dict[str, Any] = {"lr": 1e-3, "eps": 1e-3}


class _Arms:
    """The ways to train, and the state that each holds.

    Attributes:
        states: by the arm's name.
    """

    def __init__(self) -> None:
        self.states: dict[str, Callable[[], Iterable[Any]]] = {}

    def local(self, task: Task) -> Arm:
        """Every rank trains alone."""
        return self._arm("no communication", task, torch.optim.AdamW(task.model.parameters(), **_OPTIONS))

    def everywhere(self, task: Task) -> Arm:
        """Every rank steps all weights."""
        return self._horovod("horovod", task, False)

    def sharded(self, task: Task) -> Arm:
        """Every rank steps a share; ``step()`` waits for all weights."""
        return self._horovod("host_optimizer", task, True)

    def zero(self, task: Task) -> Arm:
        """DDP over Gloo with torch's ZeroRedundancyOptimizer."""
        model, parameters = wrap_in_ddp(task.model), task.model.parameters()
        optimizer = ZeroRedundancyOptimizer(
            parameters, torch.optim.AdamW, parameters_as_bucket_view=True, **_OPTIONS
        )  # fmt: skip
        arm = self._arm("ddp with zero", task, optimizer, model)
        self.states[arm.name] = optimizer.optim.state.values
        return arm

    def _horovod(self, name: str, task: Task, host: bool) -> Arm:
        plain = torch.optim.AdamW(task.model.parameters(), **_OPTIONS)
        hvd.broadcast_parameters(task.model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(plain, task.model.named_parameters(), host_optimizer=host)
        arm = self._arm(name, task, optimizer)
        if host:
            self.states[name] = optimizer._inner.state.values
        return arm

    def _arm(self, name: str, task: Task, optimizer: Any, model: torch.nn.Module | None = None) -> Arm:
        self.states[name] = lambda: optimizer.state.values()
        return torch_arm(name, task, optimizer, model)


def _nbytes(states: Iterable[dict[str, Any]]) -> int:
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))


def main(model: str, rounds: int = 7, steps: int = 3) -> None:
    """Train in every way, and print step times and the most bytes of state on one rank."""
    hvd.init()
    control, arms, is_tiny = Agreement(hvd), _Arms(), model.startswith("tiny-")
    start_gloo(control)
    makers = (arms.local, arms.everywhere, arms.sharded, arms.zero)
    scale = {"rounds": 1, "steps": 1, "tiny": True} if is_tiny else {"rounds": rounds, "steps": steps}
    [row] = run_train([model.removeprefix("tiny-")], make_task, makers, control, lambda *_: None, **scale)
    for name, state in arms.states.items():
        held = max(control.gather(_nbytes(state())))
        if hvd.rank() == 0:
            one = row["results"][name]
            print(f"{name:22s} step {one['median_s'] * 1e3:7.1f} ms, state {held / 1e6:7.1f} MB per rank")
    stop_gloo(control)
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "mlp")
