"""Contenders that torch code calls in the rank processes: horovod and Gloo."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import horovod.torch as hvd
from horovod.bench.cases import Case, input_blocks, output_blocks
from horovod.bench.control import Agreement, CallContender, WrongResultError
from horovod.bench.gloo import start_gloo, stop_gloo

__all__ = ["Gloo", "Ours"]

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
    """horovod on ordinary tensors, or on tensors in the arena (``hvd.empty``).

    Args:
        control: agreement between the ranks.
        arena: whether the tensors live in the arena.
    """

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
