"""The ranks of one host, here or elsewhere, as ``supervise`` sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["Job"]


class Job:
    """The ranks of one host. No method blocks but ``kill`` and ``close``.

    Args:
        first: rank of the first of them.
        host: its name.
        size: how many they are.
    """

    #: Whether output comes through files that the caller opens, rather than with the news.
    has_pipes = False

    def __init__(self, first: int, host: str, size: int) -> None:
        self.first, self.host, self.size = first, host, size

    def fileno(self) -> int:
        """Readable when there is news."""
        raise NotImplementedError

    def start(self, outputs: Sequence[tuple[int, int]], stdin: int | None) -> None:
        """Start the ranks.

        Args:
            outputs: per rank, the files that become its standard output and error, where ``has_pipes``.
            stdin: standard input of the host's first rank, as ``subprocess`` takes it, where ``has_pipes``.

        Raises:
            LaunchError: that failed.
        """
        raise NotImplementedError

    def tell(self, order: bytes) -> None:
        """Send an order, see ``keeper``; safe in a signal handler."""
        raise NotImplementedError

    def news(self) -> Iterator[dict[str, Any]]:
        """Yield the keeper's events since the last call, with ranks of the job.

        Besides: ``{"lost": reason}`` when nobody answers any more, ``{"output": (rank, stream), "data": bytes}``.
        """
        raise NotImplementedError

    def of_job(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return a keeper's event with ranks of the job instead of those of the host."""
        if "rank" in event:
            return {**event, "rank": self.first + event["rank"]}
        if "passed_on" in event:
            return {"passed_on": [self.first + rank for rank in event["passed_on"]]}
        return event

    def silence(self) -> Iterator[dict[str, Any]]:
        """``{"lost": reason}`` when too long nothing has come."""
        return iter(())

    @property
    def outgoing(self) -> int:
        """Descriptor to poll for writing; -1 when nothing waits."""
        return -1

    @property
    def due_at(self) -> float | None:
        """When ``tend`` is due."""
        return None

    def flush(self) -> None:
        """Write what waits."""

    def tend(self) -> None:
        """Do what is due."""

    def take(self) -> None:
        """More output may come."""

    def refuse(self, rank: int, stream: str) -> None:
        """Nobody reads this output any more."""

    def kill(self) -> None:
        """Kill all ranks, by force."""
        raise NotImplementedError

    def hang_up(self) -> None:
        """Begin with ``close``, without waiting."""

    def close(self) -> None:
        """Let go; if ranks still run, this kills them."""
        raise NotImplementedError
