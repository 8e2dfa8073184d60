"""Contenders that are one function of one array: an allreduce out of place, in whatever framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401  numpy then knows bfloat16 by name
import numpy as np

from horovod.bench.cases import Case, output_blocks
from horovod.bench.control import Agreement, CallContender, WrongResultError

__all__ = ["Caller"]

Array = np.ndarray[Any, np.dtype[Any]]


class Caller(CallContender):
    """A contender.

    Args:
        name: its column.
        control: how the ranks agree.
        bind: makes of an array the call to time, whose result numpy understands.
        is_sum: whether the result is the sum over the ranks; else it is the array itself.
    """

    def __init__(
        self, name: str, control: Agreement, bind: Callable[[Array], Callable[[], Any]], is_sum: bool = True
    ) -> None:
        super().__init__(name, control)
        self._bind = bind
        self._is_sum = is_sum

    def why_not(self, case: Case) -> str:
        """Only allreduce is compared between frameworks."""
        return "" if case.op == "allreduce" else "only allreduce is compared between frameworks"

    def prepare(self, case: Case) -> None:
        rank, size = self._control.rank, self._control.size
        self._call = self._bind(np.full(case.count(size), rank + 1, case.dtype))
        expected = output_blocks(case.op, rank, size)[0] if self._is_sum else rank + 1
        result = np.asarray(self._call())
        if not bool((result == expected).all()):
            raise WrongResultError(f"{self.name}: {case} should be {expected} everywhere, got {result[:4].tolist()}…")
