"""A world of one rank, and contenders whose times are known beforehand."""

from __future__ import annotations

from typing import TypeVar

from horovod.bench.cases import Case
from horovod.bench.control import Agreement

T = TypeVar("T")


class LocalAgreement(Agreement):
    """Agreement of one rank with itself."""

    rank = 0

    def __init__(self, size: int = 1) -> None:
        self.size = size

    def barrier(self) -> None:
        """Everybody is here."""

    def broadcast(self, value: T) -> T:
        return value

    def gather(self, value: T) -> list[T]:
        return [value]


class ScriptedContender:
    """Takes ``call_s`` per call and writes down what it was asked, in a log that several may share."""

    def __init__(self, name: str, call_s: float, log: list[str], *, refuses: str = "", dies_at: str = "") -> None:
        self.name = name
        self._call_s, self._log, self._refuses, self._dies_at = call_s, log, refuses, dies_at
        self._dead = False

    def why_not(self, case: Case) -> str:
        if self._dead:
            return "died"
        return "refused" if case.dtype == self._refuses else ""

    def _note(self, what: str) -> None:
        self._log.append(f"{self.name}.{what}")
        self._dead = self._dead or what == self._dies_at

    def prepare(self, case: Case) -> None:
        self._note("prepare")

    def measure(self, calls: int) -> list[float]:
        self._note("measure")
        return [] if self._dead else [self._call_s] * calls

    def release(self) -> None:
        self._note("release")

    def close(self) -> None:
        self._note("close")
