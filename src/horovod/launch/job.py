"""The ranks of one host, here or elsewhere, as a ``Supervision`` sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["Job"]


class Job:
    """The ranks of one host. Only ``kill`` and ``close`` block.

    A *rank* is here the number of a process in the job, which is unique; its *slot* is its place on the host.
    """

    #: Whether output comes through files that the caller opens, rather than with the news.
    has_pipes = False

    def __init__(self, host: str) -> None:
        self.host = host
        #: Result of each rank that has ended, if the ranks make a call; pickled if other processes make it.
        self.results: dict[int, Any] = {}

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is news."""
        raise NotImplementedError

    def start(self, stdin: int | None) -> None:
        """Get ready to start ranks; where ``has_pipes``, rank 0 gets ``stdin``, as ``subprocess`` takes it.

        Raises:
            LaunchError: the preparation failed.
        """
        raise NotImplementedError

    def start_rank(self, rank: int, slot: int, environ: Mapping[str, str], output: Sequence[int] = ()) -> None:
        """Start a rank in a slot; where ``has_pipes``, it gets these files as standard output and error, and this job
        closes them.
        """
        raise NotImplementedError

    def has_begun(self, rank: int) -> bool:
        """Return whether a running rank has called ``init()``; True if that is known only at its end."""
        return True

    def name_of(self, rank: int) -> str:
        """Return the name of a rank's process, such as "actor 01ab"; empty if its process id is enough."""
        return ""

    def kill_rank(self, rank: int) -> None:
        """Kill a rank; ``news`` reports its end as usual, and the processes below it end as after any loss."""
        raise NotImplementedError

    def kill_stopped(self, rank: int, pid: int) -> None:
        """Kill a rank if a signal has stopped its process ``pid``; ``news`` then yields ``{"stopped": rank}``.

        A process that a debugger holds is not touched.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Start no more ranks: end when all running ranks have ended."""
        raise NotImplementedError

    def tell(self, order: bytes) -> None:
        """Send an order, see ``keeper``; safe in a signal handler."""
        raise NotImplementedError

    def news(self) -> Iterator[dict[str, Any]]:
        """Yield the keeper's events since the last call.

        Also ``{"lost": reason}`` when the other end answers no more, ``{"output": (rank, stream), "data": bytes}``.
        """
        raise NotImplementedError

    def silence(self) -> Iterator[dict[str, Any]]:
        """Yield ``{"lost": reason}`` when nothing has come for too long."""
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
        """Write waiting data."""

    def tend(self) -> None:
        """Do the work that is due."""

    def take(self) -> None:
        """Let more output come."""

    def refuse(self, rank: int, stream: str) -> None:
        """Stop an output that has no reader any more."""

    def kill(self) -> None:
        """Kill all ranks, by force."""
        raise NotImplementedError

    def hang_up(self) -> None:
        """Begin to close, without waiting."""

    def close(self) -> None:
        """Release everything; if ranks still run, this kills them."""
        raise NotImplementedError
