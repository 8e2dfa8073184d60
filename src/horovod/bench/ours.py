"""horovod itself, through the public ``horovod.torch`` API."""

from __future__ import annotations

from collections.abc import Callable

import torch

import horovod.torch as hvd
from horovod.bench.cases import Case
from horovod.bench.control import Control
from horovod.bench.inprocess import InProcess

__all__ = ["Ours"]


class Ours(InProcess):
    """horovod on ordinary tensors, or on tensors in the arena (``hvd.empty``).

    Args:
        control: how the ranks agree.
        arena: whether the tensors live in the arena.
    """

    def __init__(self, control: Control, *, arena: bool = False) -> None:
        super().__init__("horovod arena" if arena else "horovod", control)
        self._arena = arena

    def why_not(self, case: Case) -> str:
        """We take every case."""
        return ""

    def _allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        if self._arena:
            tensor: torch.Tensor = hvd.empty(count, dtype=dtype)
            return tensor
        return torch.empty(count, dtype=dtype)

    def _bind(self, case: Case, inputs: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
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
        if case.op == "async":
            return lambda: _all_at_once(inputs, name)
        call = calls[case.op]
        return lambda: [call()]


def _all_at_once(tensors: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    handles = [hvd.allreduce_async_(tensor, name=f"{name}.{i}", op=hvd.Sum) for i, tensor in enumerate(tensors)]
    return [hvd.synchronize(handle) for handle in handles]
