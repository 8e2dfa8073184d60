"""Ranks that agree without the coordinator: all take an entry, or nobody does, whoever goes on at whatever moment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from interleaving import Stage, schedules
from plays import raise_all

from horovod.errors import PeerLostError
from horovod.links.shm import lane as module
from horovod.links.shm.lane import ShmLane
from horovod.transports.shm import futex
from horovod.transports.shm.control import LANE_OFFERS, Control
from horovod.transports.shm.mapping import create_memfd
from horovod.transports.shm.spinner import Spinner

_FILES = frozenset({str(module.__file__)})
Notes = tuple[int, ...] | None


class _Watch:
    """Gives a rank up after a while."""

    def check(self, rank: int, waited_s: float) -> None:
        raise PeerLostError(f"rank {rank} did not go on", rank=rank)


class _Ranks:
    """The lanes of some ranks, in one process."""

    def __init__(self, size: int) -> None:
        fd = create_memfd("horovod-lane-test", Control.nbytes(size))
        self.controls = [Control(fd, rank, size, 4 * size) for rank in range(size)]
        os.close(fd)
        self.lanes = [ShmLane(control, _Watch()) for control in self.controls]
        self.size = size

    def close(self) -> None:
        for control in self.controls:
            control.close()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[_Ranks]:
    made = _Ranks(getattr(request, "param", 2))
    yield made
    made.close()


def _on_stage(size: int, looks: int, schedule: dict[int, int], act: Callable[[_Ranks, int], list[Notes]]) -> Stage:
    """Let every rank act; entries must have been taken by all, or by nobody."""
    with pytest.MonkeyPatch.context() as patch:
        stage = Stage(schedule, _FILES)

        def let_go_on(spinner: Spinner) -> Iterator[None]:
            for _ in range(looks):
                stage.sleep(0)
                yield

        patch.setattr(Spinner, "looks", let_go_on)
        patch.setattr(futex, "wait", stage.futex_wait)
        made = _Ranks(size)
        for control in made.controls:
            stage.words.update(zip(control._bell_address, range(size), strict=True))
        try:
            actors = stage.play(*[lambda rank=rank: act(made, rank) for rank in range(size)])
            raise_all(actors)
            results = [actor.result for actor in actors]
            assert results == [results[0]] * size, results
            _seen.update(results[0])
        finally:
            stage.close()
            made.close()
    return stage


_seen: set[Notes] = set()


def _three_in_a_row(made: _Ranks, rank: int) -> list[Notes]:
    """Offer three entries; what is not taken is executed by the log, as it were."""
    lane, found = made.lanes[rank], []
    for sequence in range(3):
        lane._to_skip = 0
        note = 10 * sequence + rank
        found.append(lane.meet(sequence, 1, note, lambda: False))
        if found[-1] is None:
            lane.decline(sequence)
    return found


def _unlike(made: _Ranks, rank: int) -> list[Notes]:
    """Offer different entries, then the same one."""
    lane = made.lanes[rank]
    first = lane.meet(0, 1 + rank, rank, lambda: False)
    lane.decline(0)
    lane._to_skip = 0
    return [first, lane.meet(1, 1, rank, lambda: False)]


@pytest.mark.parametrize(("size", "looks", "most"), [(2, 0, 2), (2, 1, 2), (3, 0, 1), (3, 2, 1)])
def test_all_take_an_entry_or_nobody_does(size: int, looks: int, most: int) -> None:
    _seen.clear()
    count = sum(1 for _ in schedules(lambda s: _on_stage(size, looks, s, _three_in_a_row).choices, most))
    assert count > 50
    whole = {tuple(10 * sequence + rank for rank in range(size)) for sequence in range(3)}
    assert not looks or _seen >= whole
    assert looks > 1 or None in _seen


@pytest.mark.parametrize("size", [2, 3])
def test_what_differs_is_taken_by_nobody(size: int) -> None:
    _seen.clear()
    assert sum(1 for _ in schedules(lambda s: _on_stage(size, 1, s, _unlike).choices, 1)) > 20
    assert _seen == {None, tuple(range(size))}


def test_it_finds_who_withdraws_without_looking_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShmLane, "_is_taken", lambda self, half, offer: False)
    with pytest.raises(AssertionError):
        for _ in schedules(lambda s: _on_stage(2, 0, s, _three_in_a_row).choices, 2):
            pass


def test_who_asks_the_coordinator_is_not_waited_for(ranks: _Ranks) -> None:
    looked: list[None] = []
    ranks.lanes[1].decline(7)
    assert ranks.lanes[0].meet(7, 1, 0, lambda: bool(looked.append(None))) is None
    assert not looked
    # In the entry before, that is: nobody knows yet what it does next.
    ranks.lanes[0].meet(8, 1, 0, lambda: bool(looked.append(None)))
    assert looked


def test_after_offers_in_vain_it_is_tried_less_and_less_often_and_then_as_before(ranks: _Ranks) -> None:
    lane, control = ranks.lanes[0], ranks.controls[0]
    tried: list[int] = []
    for attempt in range(40):
        lane.meet(attempt, 1, 0, lambda: False)
        if control.words64[control.lane[0] + LANE_OFFERS] >> 24 == attempt and attempt not in tried:
            tried.append(attempt)
    assert tried == [0, 2, 5, 10, 19, 36]
    lane._to_skip = 0
    ranks.controls[1].words64[ranks.controls[1].lane[1] + LANE_OFFERS] = 40 << 24 | 1
    assert lane.meet(40, 1, 0, lambda: False) is not None
    lane.meet(41, 1, 0, lambda: False)
    assert lane._to_skip == 1


def test_a_rank_that_dies_before_it_says_whether_it_takes_an_entry_is_named(ranks: _Ranks) -> None:
    def offer_and_die() -> bool:
        ranks.controls[1].words64[ranks.controls[1].lane[1] + LANE_OFFERS] = 3 << 24 | 1
        return True

    with pytest.raises(PeerLostError, match="rank 1 did not go on"):
        ranks.lanes[0].meet(3, 1, 0, offer_and_die)
