"""Contenders and ways to train of torch: horovod, Gloo and MPI for collectives; horovod and DDP for training steps."""

from __future__ import annotations

import abc
import argparse
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import horovod.torch as hvd
from horovod.bench.cases import Case, input_blocks, output_blocks
from horovod.bench.control import Agreement, CallContender, Contender, WrongResultError
from horovod.bench.gloo import start_gloo, stop_gloo
from horovod.bench.models import Task, make_task
from horovod.bench.stepping import Arm

__all__ = [
    "Gloo", "Ours", "arms", "contenders", "ddp_arm", "horovod_arm", "local_arm", "make_task", "sgd", "torch_arm",
    "wrap_in_ddp",
]  # fmt: skip

_Call = Callable[[], list[torch.Tensor]]


class _Tensors(CallContender):
    """A contender whose operations take tensors of torch."""

    def _allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype)

    @abc.abstractmethod
    def _bind(self, case: Case, inputs: list[torch.Tensor]) -> _Call:
        """Return the call to time: it runs the operation on ``inputs`` once and returns its outputs."""

    def prepare(self, case: Case) -> None:
        """Allocate, run once, check, and leave zeros, so that repeated sums do not overflow."""
        control, dtype = self._control, getattr(torch, case.dtype)
        inputs = [self._allocate(case.count(control.size), dtype) for _ in range(case.batch)]
        blocks = input_blocks(case.op, control.rank, control.size)
        for tensor in inputs:
            for part, value in zip(tensor.view(len(blocks), -1), blocks, strict=True):
                part.fill_(value)
        self._call = self._bind(case, inputs)
        expected = output_blocks(case.op, control.rank, control.size)
        for output in self._call():
            for index, (part, value) in enumerate(zip(output.view(len(expected), -1), expected, strict=True)):
                if not bool((part == value).all()):
                    what = f"{self.name}: {case} on rank {control.rank}, block {index}"
                    raise WrongResultError(f"{what}: expected {value} everywhere, got {part[:4].tolist()}…")
        for tensor in inputs:
            tensor.zero_()


class Ours(_Tensors):
    """horovod on ordinary tensors, or on tensors in the arena (``hvd.empty``)."""

    def __init__(self, control: Agreement, *, arena: bool = False) -> None:
        super().__init__("horovod arena" if arena else "horovod", control)
        self._arena = arena

    def _allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        tensor: torch.Tensor = hvd.empty(count, dtype=dtype) if self._arena else torch.empty(count, dtype=dtype)
        return tensor

    def _bind(self, case: Case, inputs: list[torch.Tensor]) -> _Call:
        tensor = inputs[0]
        name = f"bench.{self.name}.{case.op}.{case.dtype}.{case.nbytes}"
        calls: dict[str, Callable[[], torch.Tensor]] = {
            "allreduce": lambda: hvd.allreduce_(tensor, name=name, op=hvd.Sum),
            "allreduce-new": lambda: hvd.allreduce(tensor, name=name, op=hvd.Sum),
            "broadcast": lambda: hvd.broadcast_(tensor, 0, name=name),
            "allgather": lambda: hvd.allgather(tensor, name=name),
            "alltoall": lambda: hvd.alltoall(tensor, name=name),
            "reducescatter": lambda: hvd.reducescatter(tensor, name=name, op=hvd.Sum),
        }

        def all_at_once() -> list[torch.Tensor]:
            handles = [hvd.allreduce_async_(each, name=f"{name}.{i}", op=hvd.Sum) for i, each in enumerate(inputs)]
            return [hvd.synchronize(handle) for handle in handles]

        if case.op == "async":
            return all_at_once
        call = calls[case.op]
        return lambda: [call()]


class Gloo(_Tensors):
    """torch.distributed over Gloo."""

    def __init__(self, control: Agreement) -> None:
        super().__init__("gloo", control)
        start_gloo(control)

    def _bind(self, case: Case, inputs: list[torch.Tensor]) -> _Call:
        tensor, size = inputs[0], self._control.size

        def all_at_once() -> list[torch.Tensor]:
            for work in [dist.all_reduce(each, async_op=True) for each in inputs]:
                work.wait()
            return inputs

        def in_place(function: Callable[..., Any], target: torch.Tensor, *args: Any) -> list[torch.Tensor]:
            function(target, *args)
            return [target]

        if case.op == "async":
            return all_at_once
        if case.op == "allreduce":
            return lambda: in_place(dist.all_reduce, tensor)
        if case.op == "broadcast":
            return lambda: in_place(dist.broadcast, tensor, 0)
        if case.op == "allreduce-new":
            new = torch.empty_like(tensor)  # Gloo reduces in place only
            return lambda: in_place(dist.all_reduce, new.copy_(tensor))
        names, count = {
            "allgather": (("all_gather_single", "all_gather_into_tensor"), tensor.numel() * size),
            "reducescatter": (("reduce_scatter_single", "reduce_scatter_tensor"), tensor.numel() // size),
            "alltoall": (("all_to_all_single",), tensor.numel()),
        }[case.op]
        # Newer releases of torch renamed the collectives of single tensors.
        function = next(getattr(dist, name) for name in names if hasattr(dist, name))
        output = tensor.new_empty(count)
        return lambda: in_place(function, output, tensor)

    def close(self) -> None:
        stop_gloo(self._control)


def contenders(control: Agreement, args: argparse.Namespace) -> list[Contender]:
    """Return the libraries whose collectives are measured, as the command line says."""
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
    """Return a way to train a task of torch, or a model that wraps the task's own."""

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
