"""A training step of torch: with horovod, with DDP over Gloo, and with no communication."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from horovod.bench.models import Task
from horovod.bench.stepping import Arm

__all__ = ["ddp_arm", "horovod_arm", "local_arm", "torch_arm", "wrap_in_ddp"]

_RATE = 0.01


def _sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.9)


def _stepper(task: Task, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        task.loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def torch_arm(name: str, model: torch.nn.Module, step: Callable[[], None]) -> Arm:
    """Return an arm that trains a model of torch."""

    def weights() -> np.ndarray[Any, np.dtype[Any]]:
        return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).numpy()

    return Arm(name, step, weights)


def local_arm(task: Task) -> Arm:
    """Every rank trains alone: what a step costs without communication."""
    return torch_arm("no communication", task.model, _stepper(task, task.model, _sgd(task.model)))


def wrap_in_ddp(model: torch.nn.Module) -> torch.nn.Module:
    """Return DDP at its best on CPU: gradients are views of its buckets, buffers are not broadcast in a step."""
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {"gradient_as_bucket_view": True, buffers: False}
    return DistributedDataParallel(model, **options)


def ddp_arm(task: Task) -> Arm:
    """torch DDP over Gloo; see ``wrap_in_ddp``."""
    model = wrap_in_ddp(task.model)
    return torch_arm("ddp", task.model, _stepper(task, model, _sgd(model)))


def horovod_arm(task: Task) -> Arm:
    """The five lines of a horovod script."""
    import horovod.torch as hvd

    optimizer = hvd.DistributedOptimizer(_sgd(task.model), named_parameters=task.model.named_parameters())
    hvd.broadcast_parameters(task.model.state_dict(), root_rank=0)
    return torch_arm("horovod", task.model, _stepper(task, task.model, optimizer))
