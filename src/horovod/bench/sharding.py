"""An optimizer whose state exists once, beside one that has it on every rank, and beside torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

import horovod.torch as hvd
from horovod.bench.control import Control
from horovod.bench.events import Tell
from horovod.bench.models import Task, make_task
from horovod.bench.stepping import Arm, run_train
from horovod.bench.train import torch_arm, wrap_in_ddp

__all__ = ["run_optimizer"]

#: With this eps a gradient that is all rounding moves nothing, so that all arms can be compared.
_OPTIONS: dict[str, Any] = {"lr": 1e-3, "eps": 1e-3}


def run_optimizer(models: tuple[str, ...], control: Control, tell: Tell, **options: Any) -> list[dict[str, Any]]:
    """Train with AdamW in every way; called on all ranks, in step. See ``run_train`` for the arguments.

    Returns:
        Its rows; each result also has ``state_bytes``, the most that one rank holds of the optimizer's state.
    """
    rows = []
    for model in models:
        arms = _Arms()
        makers = (arms.local, arms.everywhere, arms.sharded, arms.ahead, arms.zero)
        [row] = run_train([model], make_task, makers, control, tell, **options)
        for name, state in arms.states.items():
            row["results"][name]["state_bytes"] = max(control.gather(_nbytes(state())))
        rows.append(row)
    return rows


class _Arms:
    """The ways, and what each has of the state.

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

    def ahead(self, task: Task) -> Arm:
        """The same, but layers wait for their own weights."""
        return self._horovod("host_optimizer=model", task, task.model)

    def zero(self, task: Task) -> Arm:
        """DDP over Gloo with torch's ZeroRedundancyOptimizer."""
        model, parameters = wrap_in_ddp(task.model), task.model.parameters()
        optimizer = ZeroRedundancyOptimizer(
            parameters, torch.optim.AdamW, parameters_as_bucket_view=True, **_OPTIONS
        )  # fmt: skip
        arm = self._arm("ddp with zero", task, optimizer, model)
        self.states[arm.name] = optimizer.optim.state.values
        return arm

    def _horovod(self, name: str, task: Task, host: bool | torch.nn.Module) -> Arm:
        plain = torch.optim.AdamW(task.model.parameters(), **_OPTIONS)
        hvd.broadcast_parameters(task.model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(plain, task.model.named_parameters(), host_optimizer=host)
        arm = self._arm(name, task, optimizer)
        if not host:
            return arm
        self.states[name] = optimizer._inner.state.values
        weights = arm.weights

        def all_weights() -> Any:
            optimizer.wait_for_weights()
            return weights()

        arm.weights = all_weights
        return arm

    def _arm(self, name: str, task: Task, optimizer: Any, model: torch.nn.Module | None = None) -> Arm:
        def step() -> None:
            optimizer.zero_grad()
            task.loss(model or task.model).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        self.states[name] = lambda: optimizer.state.values()
        return torch_arm(name, task.model, step)


def _nbytes(states: Iterable[dict[str, Any]]) -> int:
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))
