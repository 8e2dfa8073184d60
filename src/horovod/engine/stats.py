"""The numbers of a rank: its operations, bytes and waits since ``init()``."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Stats", "Usage"]


@dataclass(frozen=True)
class Usage:
    """How much of one thing there was.

    Attributes:
        operations: how many were submitted; a grouped one counts once.
        bytes: of this rank's tensors, together.
    """

    operations: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Stats:
    """Operations, bytes and waits of this rank since ``init()``.

    Attributes:
        elapsed_s: seconds since ``init()``.
        operations: how many were submitted.
        bytes: of this rank's tensors in them.
        in_flight: how many of them are not done.
        kinds: the same for each kind, such as ``allreduce``.
        fused: how many were executed together with others.
        fusions: how many executions these took.
        waits: how often a thread had to wait in ``synchronize`` or in an operation without ``_async``.
        wait_s: seconds spent there, of all threads together.
    """

    elapsed_s: float
    operations: int
    bytes: int
    in_flight: int
    kinds: dict[str, Usage]
    fused: int
    fusions: int
    waits: int
    wait_s: float

    @property
    def executions(self) -> int:
        """How many executions all that is done took."""
        return self.operations - self.in_flight - self.fused + self.fusions

    @property
    def fusion_efficiency(self) -> float:
        """The share of executions that fusion has saved: 0 for none, 0.9 when ten operations become one."""
        done = self.operations - self.in_flight
        return 1 - self.executions / done if done else 0.0
