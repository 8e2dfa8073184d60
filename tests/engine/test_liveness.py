"""When there is no point in waiting for the log any more, and when there still is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from horovod.core.generation import Generation, Member
from horovod.engine.liveness import Liveness
from horovod.engine.ports import SILENT
from horovod.errors import PeerLostError


class Log:
    """Operations in flight, some of which may have ended in entries of the log that are not read yet."""

    def __init__(self, unread: list[str], waiting: list[str]) -> None:
        self.unread, self.waiting = unread, waiting

    def advance(self) -> None:
        self.waiting = [name for name in self.waiting if name not in self.unread]

    def in_flight(self) -> list[str]:
        return self.waiting

    def describe(self, name: str) -> str:
        return f"allreduce {name!r}"


def _tick(log: Any) -> str:
    peers: Any = SimpleNamespace(gone=lambda: 1, fate=lambda rank, why: f"rank {rank} died")
    board: Any = SimpleNamespace(reason=lambda rank: None)
    generation = Generation([Member(100, "here"), Member(101, "here")])
    with pytest.raises(PeerLostError) as caught:
        Liveness(0, generation, peers, board, SILENT).tick(log, SimpleNamespace(), 0.0)  # type: ignore[arg-type]
    return str(caught.value)


def test_what_a_dead_rank_had_finished_is_not_what_was_waited_for_in_vain() -> None:
    log = Log(unread=["last"], waiting=["last"])
    assert "last" not in _tick(log)
    assert not log.waiting, "this rank has its result"


@pytest.mark.parametrize(("failed", "awaited"), [((3,), 0), ((3,), 2), ((0, 3), 0), ((3,), 3)])
def test_a_departure_ends_only_waits_for_a_rank_that_failed_because_of_it(
    failed: tuple[int, ...], awaited: int
) -> None:
    """Rank 2 has left; rank 3 waits for it in a later operation than the one in which this rank waits."""
    peers: Any = SimpleNamespace(
        gone=lambda: 2,
        has_left=lambda rank: rank == 2,
        has_failed=failed.__contains__,
        culprit_of=lambda rank: 2 if rank in failed else rank,
        has_ended=lambda rank: False,
        fate=lambda rank, why: f"rank {rank} left",
    )
    board: Any = SimpleNamespace(reason=lambda rank: None)
    liveness = Liveness(1, Generation([Member(100 + rank, "here") for rank in range(4)]), peers, board, SILENT)
    if awaited not in failed:
        liveness.check(awaited, 0.0)
        return
    with pytest.raises(PeerLostError, match="rank 2 left"):
        liveness.check(awaited, 0.0)


def test_what_it_had_not_is_named() -> None:
    assert "'next'" in _tick(Log(unread=["last"], waiting=["last", "next"]))


def test_an_error_that_its_caller_drops_leaves_no_alarm() -> None:
    """The rank had done its part; a rank with an alarm looks again and again instead of sleeping."""
    peers: Any = SimpleNamespace(
        gone=lambda: None, has_left={1}.__contains__, has_ended=lambda rank: False, culprit_of=lambda rank: rank,
        is_alarmed=lambda: False, fate=lambda rank, why: f"rank {rank} left",
    )  # fmt: skip
    board: Any = SimpleNamespace(reason=lambda rank: None)
    liveness = Liveness(0, Generation([Member(100 + rank, "here") for rank in range(3)]), peers, board, SILENT)
    with pytest.raises(PeerLostError, match="rank 1 left"):
        liveness.check(1, 2.0)
    liveness.check(2, 0.0)
    assert not liveness.is_alarmed
