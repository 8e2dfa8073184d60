"""The numbers of a rank: its operations, bytes and waits since ``init()``, through resets."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["Stats", "Usage"]


@dataclass(frozen=True)
class Usage:
    """Totals of one kind of operation.

    Attributes:
        operations: how many were submitted; a grouped one counts once.
        bytes: total bytes of this rank's tensors.
    """

    operations: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Stats:
    """Operations, bytes and waits of this rank since ``init()``.

    Attributes:
        elapsed_s: seconds since ``init()``.
        operations: how many were submitted.
        bytes: bytes of this rank's tensors in them.
        in_flight: how many of them are not done.
        kinds: operations and bytes of each kind, for example ``allreduce``.
        fused: how many were executed together with others.
        fusions: how many executions these took.
        waits: how often a thread had to wait in ``synchronize`` or in an operation without ``_async``.
        wait_s: seconds spent there, of all threads together.
        resets: how often the members of an elastic job have changed since this rank joined it.
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
    resets: int = 0

    def after(self, past: Stats) -> Stats:
        """Return the sum of these numbers and those of the earlier generations."""
        kinds = dict(past.kinds)
        for kind, usage in self.kinds.items():
            before = kinds.get(kind, Usage())
            kinds[kind] = Usage(before.operations + usage.operations, before.bytes + usage.bytes)
        return replace(
            self,
            elapsed_s=past.elapsed_s + self.elapsed_s,
            operations=past.operations + self.operations,
            bytes=past.bytes + self.bytes,
            kinds=dict(sorted(kinds.items())),
            fused=past.fused + self.fused,
            fusions=past.fusions + self.fusions,
            waits=past.waits + self.waits,
            wait_s=past.wait_s + self.wait_s,
            resets=past.resets + 1,
        )

    @property
    def executions(self) -> int:
        """How many executions the finished operations took."""
        return self.operations - self.in_flight - self.fused + self.fusions

    @property
    def fusion_efficiency(self) -> float:
        """The share of executions that fusion has saved: 0 for none, 0.9 when ten operations become one."""
        done = self.operations - self.in_flight
        return 1 - self.executions / done if done else 0.0
