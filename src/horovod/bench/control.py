"""How the ranks of a benchmark agree between measurements, and the interface of a contender."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from horovod.bench.cases import Case
from horovod.bench.stats import mean_of_ranks

__all__ = ["Agreement", "CallContender", "Contender", "Tell", "WrongResultError", "timed"]

T = TypeVar("T")
Tell = Callable[[int, int, str], None]
"""Progress: steps done, steps in all, the present measurement."""


class WrongResultError(AssertionError):
    """A contender computed a wrong result, so its time means nothing."""


class Agreement:
    """Agreement between ranks, outside of measured sections, through horovod itself, whose waits do not spin."""

    def __init__(self, hvd: Any) -> None:
        self.rank = int(hvd.rank())
        self.size = int(hvd.size())
        self.barrier = hvd.barrier
        self._hvd = hvd

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        result: T = self._hvd.broadcast_object(value, 0, name="bench.control")
        return result

    def gather(self, value: T) -> list[T]:
        """Return every rank's value in rank order, on every rank."""
        return list(self._hvd.allgather_object(value, name="bench.control"))


class Contender:
    """A library under measurement. All ranks call every method, in the same order."""

    name: str  # its column in the table

    def why_not(self, case: Case) -> str:
        """Return why ``case`` cannot be measured; empty when it can. Rank 0's answer counts."""
        return ""

    def prepare(self, case: Case) -> None:
        """Allocate, run once, and check the result.

        Raises:
            WrongResultError: the result is wrong.
        """
        raise NotImplementedError

    def measure(self, calls: int) -> list[float]:
        """Return the seconds of each of ``calls`` calls, as the mean over the ranks. Rank 0's answer counts."""
        raise NotImplementedError

    def release(self) -> None:
        """Free the memory of the case."""

    def close(self) -> None:
        """End this contender."""


class CallContender(Contender):
    """A contender that is called in this process."""

    def __init__(self, name: str, control: Agreement) -> None:
        self.name = name
        self._control = control
        self._call: Callable[[], Any] | None = None

    def measure(self, calls: int) -> list[float]:
        assert self._call is not None, "prepare() was not called"
        self._control.barrier()
        return mean_of_ranks(self._control.gather(timed(self._call, calls)))

    def release(self) -> None:
        self._call = None


def timed(call: Callable[[], Any], calls: int) -> list[float]:
    """Return the seconds of each of ``calls`` calls."""
    clock, times = time.perf_counter, []
    for _ in range(calls):
        start = clock()
        call()
        times.append(clock() - start)
    return times
