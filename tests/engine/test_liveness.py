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


def test_what_it_had_not_is_named() -> None:
    assert "'next'" in _tick(Log(unread=["last"], waiting=["last", "next"]))
