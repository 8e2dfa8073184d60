"""Ranks leave one after the other: those that still wait get an error that names the right rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from interleaving import Stage
from pairs import FILES, Ranks, on_stage
from plays import raise_all
from relayed import RELAYED_FILES, RelayedRanks, relay_on_stage

from horovod.engine.link import Link
from horovod.errors import PeerLostError


def test_a_rank_that_leaves_later_is_not_blamed_for_an_operation_that_already_failed() -> None:
    with pytest.MonkeyPatch.context() as patch:
        stage = Stage({}, frozenset())
        on_stage(stage, patch)
        ranks = Ranks(stage, 2)
        try:
            first, second = [engine.link.channel for engine in ranks.engines]

            def leave() -> bool:
                handle = ranks.submit(0, "alone")
                execution = ranks.engines[0]._execution
                execution.step(False)
                first.leave("done")
                second.leave("done, too")
                execution.advance()
                return handle.done

            (actor,) = stage.play(leave)
            assert actor.result is False
            ranks.stop()
        finally:
            stage.close()


@contextmanager
def _hosts(schedule: dict[int, int]) -> Iterator[tuple[Stage, RelayedRanks]]:
    """Two hosts with two ranks each; rank 2 leads the second one."""
    with pytest.MonkeyPatch.context() as patch:
        stage = Stage(schedule, FILES | RELAYED_FILES)
        on_stage(stage, patch)
        relay_on_stage(stage, patch)
        stage.is_recording = False
        try:
            ranks = RelayedRanks(stage, (2, 2))
            stage.play(lambda: stage.sleep(1e-6))
            stage.clock = 0.0
            yield stage, ranks
            ranks.stop()
        finally:
            stage.close()


def _say_last_words(link: Link, asks: bool = True) -> None:
    """Leave as ``Execution.leave`` does; without a request as it does in the middle of an operation."""
    assert link.peers is not None
    if asks:
        link.channel.leave(f"rank {link.rank} is done")
    link.peers.leave(-1)


@pytest.mark.parametrize(("leader_asks", "missing"), [(True, "rank 2 is done"), (False, "rank 2 (pid")])
def test_a_neighbour_of_a_leader_that_has_left_is_missed(leader_asks: bool, missing: str) -> None:
    """The state of rank 3 reaches rank 0 with the last words of its leader; its request never does."""
    with _hosts({}) as (stage, ranks):
        members = [engine.link for engine in ranks.engines]

        def leave() -> None:
            _say_last_words(members[2], leader_asks)
            _say_last_words(members[3])
            members[2].board.relay.close()  # type: ignore[union-attr]

        def wait(name: str) -> None:
            with pytest.raises(PeerLostError, match=missing.replace("(", r"\(")):
                ranks.wait(0, ranks.submit(0, name))

        raise_all(stage.play(leave))
        raise_all(stage.play(lambda: wait("x")))
        hub = members[0].coordinator
        assert hub is not None
        assert set(hub._gone) == {2, 3}
        assert stage.clock < 1


def test_ranks_of_another_host_leave_at_any_moment() -> None:
    """A leader and its neighbour leave at the same time; whatever the schedule, ranks 0 and 1 are told."""

    def run(schedule: dict[int, int]) -> list[int]:
        with _hosts(schedule) as (stage, ranks):
            stage.is_recording = True
            first = stage.play(lambda: ranks.engines[2].stop("done"), lambda: ranks.engines[3].stop("done"))
            stage.is_recording = False
            raise_all(first)
            waiting = [lambda rank=rank: ranks.wait(rank, ranks.submit(rank, "x")) for rank in (0, 1)]
            actors = stage.play(*waiting)
            assert all(isinstance(actor.error, PeerLostError) for actor in actors), [a.result for a in actors]
            hub = ranks.engines[0].link.coordinator
            assert hub is not None
            assert set(hub._gone) >= {2, 3}
            return stage.choices

    moments = len(run({}))
    chance = random.Random(1)
    for _ in range(60):
        run({moment: chance.randint(1, 3) for moment in chance.sample(range(moments), 3)})
