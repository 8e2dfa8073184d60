"""Contenders and ways to train of torch: horovod, Gloo and MPI for collectives; horovod and DDP for training steps."""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import horovod.torch as hvd
from horovod.bench.control import Agreement, Contender
from horovod.bench.gloo import start_gloo
from horovod.bench.models import Task, make_task
from horovod.bench.stepping import Arm
from horovod.bench.torch_calls import Gloo, Ours

__all__ = [
    "arms", "contenders", "ddp_arm", "horovod_arm", "local_arm", "make_task", "sgd", "torch_arm", "wrap_in_ddp",
]  # fmt: skip


def contenders(control: Agreement, args: argparse.Namespace) -> list[Contender]:
    """Return the libraries whose collectives are measured.

    Args:
        control: agreement between the ranks.
        args: the command line; uses ``arena``, ``against`` and ``hosts``.
    """
    found: list[Contender] = [Ours(control)]
    if args.arena:
        found.append(Ours(control, arena=True))
    for peer in args.against:
        flavour, _, prefix = peer.partition("=")
        if flavour == "gloo":
            found.append(Gloo(control))
        else:
            mpi = importlib.import_module("benchmarks.mpi")
            found.append(mpi.Mpi(flavour, control, prefix, args.hosts))
    return found


def arms(control: Agreement) -> Sequence[Callable[[Task], Arm]]:
    """Return the ways to train; the first one does not communicate."""
    start_gloo(control)
    return (local_arm, horovod_arm, ddp_arm)


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    """Return the optimizer of all ways to train."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def torch_arm(name: str, task: Task, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None = None) -> Arm:
    """Return a way to train a model of torch.

    Args:
        name: name of its row.
        task: model and batch.
        optimizer: steps the model's parameters.
        model: the module to call, if it wraps the task's own.
    """

    def step() -> None:
        optimizer.zero_grad()
        task.loss(model or task.model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def weights() -> np.ndarray[Any, np.dtype[Any]]:
        return torch.cat([parameter.detach().reshape(-1) for parameter in task.model.parameters()]).numpy()

    return Arm(name, step, weights)


def local_arm(task: Task) -> Arm:
    """Return a way without communication: every rank trains alone."""
    return torch_arm("no communication", task, sgd(task.model))


def horovod_arm(task: Task) -> Arm:
    """Return the way of a horovod script, in its five lines."""
    optimizer = hvd.DistributedOptimizer(sgd(task.model), named_parameters=task.model.named_parameters())
    hvd.broadcast_parameters(task.model.state_dict(), root_rank=0)
    return torch_arm("horovod", task, optimizer)


def ddp_arm(task: Task) -> Arm:
    """Return the way of torch DDP over Gloo; see ``wrap_in_ddp``."""
    model = wrap_in_ddp(task.model)
    return torch_arm("ddp", task, sgd(model), model)


def wrap_in_ddp(model: torch.nn.Module) -> torch.nn.Module:
    """Return DDP at its best on CPU: gradients are views of its buckets, buffers are not broadcast in a step."""
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {"gradient_as_bucket_view": True, buffers: False}
    return DistributedDataParallel(model, **options)
