"""What all ranks submit at the same moment goes without the coordinator; whatever else happens, nothing gets lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interleaving import Stage
from pairs import FILES, Ranks
from plays import Scenario, on_all, once, play, play_many, raise_all

from horovod.bindings.numpy_adapter import NumpyAdapter
from horovod.core.requests import NO_NOTE, Kind
from horovod.engine.calls import call
from horovod.engine.log import LogRunner
from horovod.engine.progress import Progress
from horovod.errors import HorovodInternalError, NotInitializedError, PeerLostError
from horovod.links.shm import lane
from horovod.transports.shm.transport import ShmTransport

_FILES = FILES | {str(Path(lane.__file__))}


def _warm(stage: Stage, ranks: Ranks, names: str = "x") -> None:
    """Let every rank know what is going to be submitted."""
    stage.is_recording = False
    for name in names:
        raise_all(stage.play(*on_all(ranks, lambda rank, name=name: ranks.run(rank, name))))  # type: ignore[misc]
    stage.is_recording, stage.clock = True, 0.0


def _agreed(ranks: Ranks) -> list[int]:
    return [engine.link.lane._count for engine in ranks.engines]  # type: ignore[union-attr]


def again_and_again(stage: Stage, ranks: Ranks) -> None:
    """One synchronous call after the other."""
    _warm(stage, ranks)
    actors = stage.play(*on_all(ranks, lambda rank: [ranks.run(rank, "x") for _ in range(3)]))
    raise_all(actors)
    assert [actor.result for actor in actors] == [[ranks.total] * 3] * len(actors)
    assert len(set(_agreed(ranks))) == 1
    assert [engine.position for engine in ranks.engines] == [4] * len(actors)


def beside_another_thread(stage: Stage, ranks: Ranks) -> None:
    """Two threads of a rank; the others come to the same in another order."""
    _warm(stage, ranks, "ab")
    others = on_all(ranks, lambda rank: [ranks.run(rank, name) for name in "ab"], 1)
    actors = stage.play(lambda: ranks.run(0, "b"), lambda: once(ranks, 0, "a"), *others)
    raise_all(actors)
    assert [actor.result for actor in actors[:2]] == [ranks.total] * 2


def beside_what_is_in_flight(stage: Stage, ranks: Ranks) -> None:
    """One rank has something in flight that the others submit later."""
    _warm(stage, ranks, "ab")

    def first(rank: int) -> list[list[float]]:
        handle = ranks.submit(rank, "a")
        return [ranks.run(rank, "b"), ranks.wait(rank, handle)]

    others = on_all(ranks, lambda rank: [ranks.run(rank, name) for name in "ba"], 1)
    actors = stage.play(lambda: first(0), *others)
    raise_all(actors)
    assert [actor.result for actor in actors] == [[ranks.total] * 2] * len(actors)


def against_shutdown(stage: Stage, ranks: Ranks) -> None:
    """A rank leaves while the others, and another thread of its own, make a call."""
    _warm(stage, ranks)
    leave = ranks.engines[0].stop
    others = on_all(ranks, lambda rank: ranks.run(rank, "x"), 1)
    actors = stage.play(lambda: ranks.run(0, "x"), lambda: leave("bye"), *others)
    raise_all(actors[:1], NotInitializedError)
    raise_all(actors[2:], PeerLostError)
    assert actors[1].error is None
    # Either all had come before it left, or nobody has a result.
    assert len({str(actor.result) for actor in (actors[0], *actors[2:])}) == 1


def against_a_failure(stage: Stage, ranks: Ranks) -> None:
    """What all agreed on cannot be executed on one rank."""
    _warm(stage, ranks)

    def broken(*args: object) -> int:
        raise HorovodInternalError("no memory")

    ranks.engines[0].transport.run = broken  # type: ignore[method-assign]
    actors = stage.play(lambda: ranks.run(0, "x"), *on_all(ranks, lambda rank: ranks.run(rank, "x"), 1))
    raise_all(actors, HorovodInternalError)
    assert "no memory" in str(actors[0].error)


_SCENARIOS = [again_and_again, beside_another_thread, beside_what_is_in_flight, against_shutdown, against_a_failure]


@pytest.mark.slow
@pytest.mark.parametrize("looks", [0, 2])
@pytest.mark.parametrize("scenario", _SCENARIOS)
def test_two_ranks(scenario: Scenario, looks: int) -> None:
    play_many(scenario, 2, files=_FILES, looks=looks)


@pytest.mark.parametrize("scenario", _SCENARIOS)
def test_three_ranks(scenario: Scenario) -> None:
    play(scenario, 3, {}, files=_FILES, looks=2)


def test_it_goes_without_the_coordinator() -> None:
    found: list[list[int]] = []

    def run(stage: Stage, ranks: Ranks) -> None:
        again_and_again(stage, ranks)
        found.append(_agreed(ranks))

    play(run, 2, {}, looks=2)
    assert found == [[3, 3]]


def test_it_finds_what_is_counted_on_one_rank_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log goes on at the same place everywhere after what was agreed on."""
    run_in_lane = LogRunner.run_in_lane

    def forgets(self: LogRunner, handle: object) -> bool:
        is_run = run_in_lane(self, handle)  # type: ignore[arg-type]
        self._sequence -= is_run and self._rank == 0
        return is_run

    def run(stage: Stage, ranks: Ranks) -> None:
        with pytest.raises(AssertionError):
            again_and_again(stage, ranks)

    monkeypatch.setattr(LogRunner, "run_in_lane", forgets)
    play(run, 2, {}, looks=2)


def test_what_was_offered_in_vain_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies where the next one will; who goes by the coordinator is read later."""
    offered, kept = [], []
    accept, offer = LogRunner.accept, ShmTransport.offer

    def looks(self: LogRunner, patient: bool) -> None:
        kept.extend([(handle.note, handle.slot) for handle in self.inbox])
        accept(self, patient)

    def notes(self: ShmTransport, work: Any, inline: Any, half: int = -1) -> int:
        offered.append(half)
        return offer(self, work, inline, half)

    def run(stage: Stage, ranks: Ranks) -> None:
        _warm(stage, ranks)
        monkeypatch.setattr(LogRunner, "accept", looks)
        monkeypatch.setattr(ShmTransport, "offer", notes)
        actors = stage.play(lambda: ranks.run(0, "x"), lambda: ranks.wait(1, ranks.submit(1, "x")))
        raise_all(actors)
        assert [actor.result for actor in actors] == [ranks.total] * 2

    play(run, 2, {}, looks=2)
    assert max(offered) >= 0
    assert len(kept) == 2
    assert all(note == NO_NOTE or slot is not None for note, slot in kept)


def test_what_the_others_are_not_through_with_wakes_nobody_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of the arena: each rank reduces a part of it for all, so it settles after this rank has done its own."""
    woken: list[int] = []

    def run(stage: Stage, ranks: Ranks) -> None:
        def act(rank: int) -> float:
            engine = ranks.engines[rank]
            value = np.frombuffer(engine.transport.allocate(64 << 10), np.float32)
            for number in range(4):
                if number == 2:
                    monkeypatch.setattr(Progress, "_wake", lambda progress: woken.append(rank))
                value[:] = rank + 1
                engine.run(call(Kind.ALLREDUCE, "big"), NumpyAdapter(), [value], [value])
            return float(value.sum())

        stage.is_recording = False
        actors = stage.play(*on_all(ranks, act))
        monkeypatch.undo()
        raise_all(actors)
        assert [actor.result for actor in actors] == [3.0 * (16 << 10)] * 2
        assert _agreed(ranks) == [3, 3]

    play(run, 2, {}, looks=2)
    assert not woken
