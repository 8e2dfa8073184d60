"""How the ranks of a benchmark agree between measurements, and what a contender looks like."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from horovod.bench.cases import Case

__all__ = ["Contender", "Control", "HorovodControl", "WrongResultError"]

T = TypeVar("T")


class WrongResultError(AssertionError):
    """An engine under measurement computed something wrong; its time means nothing."""


class Control(Protocol):
    """What the benchmark itself says between ranks; never inside a measured stretch."""

    @property
    def rank(self) -> int:
        """This process's rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def barrier(self) -> None:
        """Wait, without spinning, until every rank is here."""

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""

    def gather(self, value: T) -> list[T]:
        """Every rank's value in rank order, on every rank."""


class Contender(Protocol):
    """An engine under measurement. Every method is called on all ranks, in the same order."""

    @property
    def name(self) -> str:
        """Its column in the table."""

    def why_not(self, case: Case) -> str:
        """Why ``case`` cannot be measured (rank 0's answer counts); empty when it can."""

    def prepare(self, case: Case) -> None:
        """Allocate, run once, and check the result.

        Raises:
            WrongResultError: the result is wrong.
        """

    def measure(self, calls: int) -> list[float]:
        """Call ``calls`` times; seconds of each call, as the mean over the ranks (rank 0's answer counts)."""

    def release(self) -> None:
        """Give the memory of the case back."""

    def close(self) -> None:
        """End this contender."""


class HorovodControl:
    """Agreement through the engine that is measured: its waits sleep, and it is there anyway."""

    def __init__(self, hvd: Any) -> None:
        self._hvd = hvd

    @property
    def rank(self) -> int:
        """This process's rank."""
        return int(self._hvd.rank())

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(self._hvd.size())

    def barrier(self) -> None:
        """Wait, without spinning, until every rank is here."""
        self._hvd.barrier()

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        result: T = self._hvd.broadcast_object(value, 0, name="bench.control")
        return result

    def gather(self, value: T) -> list[T]:
        """Every rank's value in rank order, on every rank."""
        return list(self._hvd.allgather_object(value, name="bench.control"))
