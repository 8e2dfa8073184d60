"""What contenders that live in the rank processes share: tensors, the check, and the timed loop."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable
from typing import Any

import torch

from horovod.bench.cases import Case, input_blocks, output_blocks
from horovod.bench.control import Control, WrongResultError
from horovod.bench.stats import mean_of_ranks

__all__ = ["InProcess"]


class InProcess(abc.ABC):
    """A contender that is called in this very process.

    Args:
        name: its column.
        control: how the ranks agree.
    """

    def __init__(self, name: str, control: Control) -> None:
        self.name = name
        self._control = control
        self._call: Callable[[], list[torch.Tensor]] | None = None

    @abc.abstractmethod
    def why_not(self, case: Case) -> str:
        """Why ``case`` cannot be measured; empty when it can."""

    @abc.abstractmethod
    def _allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of ``count`` elements where this contender is to find it."""

    @abc.abstractmethod
    def _bind(self, case: Case, inputs: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """The call to time: runs the operation on ``inputs`` once and returns its outputs."""

    def prepare(self, case: Case) -> None:
        """Allocate, run once, check, and leave zeros, which any number of sums keep as they are."""
        control, dtype = self._control, getattr(torch, case.dtype)
        inputs = [self._allocate(case.count(control.size), dtype) for _ in range(case.batch)]
        blocks = input_blocks(case.op, control.rank, control.size)
        for tensor in inputs:
            _fill(tensor, blocks)
        self._call = self._bind(case, inputs)
        expected = output_blocks(case.op, control.rank, control.size)
        for output in self._call():
            _check(output, expected, f"{self.name}: {case} on rank {control.rank}")
        for tensor in inputs:
            tensor.zero_()

    def measure(self, calls: int) -> list[float]:
        """Time ``calls`` calls, each as the mean over the ranks."""
        call = self._call
        if call is None:
            raise RuntimeError("prepare() was not called")
        clock = time.perf_counter
        times = []
        self._control.barrier()
        for _ in range(calls):
            start = clock()
            call()
            times.append(clock() - start)
        return mean_of_ranks(self._control.gather(times))

    def release(self) -> None:
        """Drop the tensors of the case."""
        self._call = None

    def close(self) -> None:
        """End this contender."""
        self.release()


def _fill(tensor: torch.Tensor, blocks: list[int]) -> None:
    for part, value in zip(tensor.view(len(blocks), -1), blocks, strict=True):
        part.fill_(value)


def _check(output: Any, blocks: list[int], what: str) -> None:
    for index, (part, value) in enumerate(zip(output.view(len(blocks), -1), blocks, strict=True)):
        if not bool((part == value).all()):
            raise WrongResultError(f"{what}: block {index} should be {value} everywhere, got {part[:4].tolist()}…")
