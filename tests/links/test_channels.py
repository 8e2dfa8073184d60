"""The log of a host whose ring is full: the rank that serves the others executes what they can read, and no more."""

from __future__ import annotations

import os

import pytest

from horovod.core.coordinator import LogEntry
from horovod.core.requests import Kind, Response
from horovod.links.shm.channel import CoordinatorChannel, WorkerChannel
from horovod.transports.shm import control
from horovod.transports.shm.control import Control
from horovod.transports.shm.mapping import create_memfd


class Decisions:
    """A coordinator that has decided."""

    def __init__(self, log: list[LogEntry]) -> None:
        self.log = log

    def take(self) -> list[LogEntry]:
        """Return all, once."""
        log, self.log = self.log, []
        return log


@pytest.mark.parametrize("text", ["x" * 40, "x" * 3000], ids=["many entries", "an entry longer than the ring"])
@pytest.mark.parametrize("runs_first", [0, 1])
def test_ranks_that_need_each_other_for_each_entry_come_to_the_end_of_a_log_longer_than_the_ring(
    monkeypatch: pytest.MonkeyPatch, text: str, runs_first: int
) -> None:
    """A job of several hosts with thousands of operations at once hung: the server waited for room to tell of the last
    ones, and the others waited for the server in the first ones.
    """
    monkeypatch.setattr(control, "LOG_RING_BYTES", 1024)
    fd = create_memfd("horovod-test", Control.nbytes(2))
    pages = [Control(fd, rank, 2, cores=2) for rank in range(2)]
    os.close(fd)
    log: list[LogEntry] = []
    for number in range(50):
        log += [
            LogEntry((number,), response=Response(Kind.ALLREDUCE, "a", 0, (0, 1), error=text)),
            LogEntry((number,)),
            LogEntry((number, number, number)),
        ]
    server = CoordinatorChannel(pages[0], Decisions(list(log)), (0, 1))  # type: ignore[arg-type]
    channels = [server, WorkerChannel(pages[1])]
    server.tend(lambda rank: "")
    found: list[list[LogEntry]] = [[], []]
    for _ in range(1000):
        for rank in (runs_first, 1 - runs_first):
            # A rank executes an entry when the other one has executed those before it.
            while len(found[rank]) <= len(found[1 - rank]) and (entry := channels[rank].next()) is not None:
                found[rank].append(entry)
    assert found == [log, log]
    assert not server.has_news() and not server.is_behind()
    for page in pages:
        page.close()
