"""The ranks of one host, here or elsewhere, as ``supervise`` sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["Job"]


class Job:
    """The ranks of one host. No method blocks but ``kill`` and ``close``.

    A *rank* is here the number of a process in the job, which no other process gets; its *slot* is its place on the
    host.

    Args:
        host: its name.
    """

    #: Whether output comes through files that the caller opens, rather than with the news.
    has_pipes = False

    def __init__(self, host: str) -> None:
        self.host = host
        #: Pickled result of each rank that has ended, if the ranks make a call of ``horovod.run``.
        self.results: dict[int, bytes] = {}

    def fileno(self) -> int:
        """Readable when there is news."""
        raise NotImplementedError

    def start(self, stdin: int | None) -> None:
        """Get ready to start ranks.

        Args:
            stdin: standard input of rank 0, as ``subprocess`` takes it, where ``has_pipes``.

        Raises:
            LaunchError: that failed.
        """
        raise NotImplementedError

    def start_rank(self, rank: int, slot: int, environ: Mapping[str, str], output: Sequence[int] = ()) -> None:
        """Start a rank.

        Args:
            rank: its number.
            slot: its place on the host.
            environ: its own variables.
            output: files that become its standard output and error, where ``has_pipes``; this job closes them.
        """
        raise NotImplementedError

    def has_begun(self, rank: int) -> bool:
        """Whether a rank that runs here has called ``init()``; true where that is known at its end only."""
        return True

    def kill_rank(self, rank: int) -> None:
        """Kill a rank and all that it has started; its end is reported as that of others."""
        raise NotImplementedError

    def kill_stopped(self, rank: int, pid: int) -> None:
        """Kill a rank if its process ``pid`` is stopped by a signal; ``{"stopped": rank}`` among the news says so.

        A process that a debugger holds is not touched.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """No more ranks will be started: end when those that run have ended."""
        raise NotImplementedError

    def tell(self, order: bytes) -> None:
        """Send an order, see ``keeper``; safe in a signal handler."""
        raise NotImplementedError

    def news(self) -> Iterator[dict[str, Any]]:
        """Yield the keeper's events since the last call.

        Besides: ``{"lost": reason}`` when nobody answers any more, ``{"output": (rank, stream), "data": bytes}``.
        """
        raise NotImplementedError

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
