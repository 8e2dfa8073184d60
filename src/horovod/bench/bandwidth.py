"""The machine's memory bandwidth, measured as a contender: the limit that any data plane lives under."""

from __future__ import annotations

from collections.abc import Callable

import torch

from horovod.bench.cases import DTYPES, LIMIT, Case, memory_traffic
from horovod.bench.control import Control
from horovod.bench.inprocess import InProcess

__all__ = ["Sweep"]


class Sweep(InProcess):
    """Every rank reads and writes back its share of the bytes that the operation must at least read and write.

    In place, because a copy to another place makes the processor fetch the target as well, which no
    good reduction needs. It takes its turns like the others, so that it sees the same machine. Small
    sweeps stay in the caches, as small collectives do.
    """

    def __init__(self, control: Control) -> None:
        super().__init__(LIMIT, control)

    def why_not(self, case: Case) -> str:
        """A sweep is always possible."""
        return ""

    def prepare(self, case: Case) -> None:
        """Allocate; there is no result to check."""
        self._call = self._bind(case, [])

    def _allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def _bind(self, case: Case, inputs: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        size = self._control.size
        moved = case.nbytes * case.batch * memory_traffic(case.op, size) / size
        # Half of the traffic is read, half is written; float32 whatever the case's type, for bytes are bytes.
        swept = self._allocate(max(1, int(moved / 2 / DTYPES["float32"])), torch.float32)
        return lambda: [swept.neg_()]
