"""Scenarios that engines of one process play on a ``Stage``, with changes of threads at chosen moments."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from interleaving import Actor, Stage, schedules
from pairs import FILES, Ranks, on_stage

__all__ = ["Boom", "Scenario", "on_all", "once", "play", "play_all", "play_many", "raise_all"]

Scenario = Callable[[Stage, Ranks], None]

#: How many schedules are drawn, and in how many moments each may differ from the usual.
_DRAWN, _DEPTH = 120, 3


class Boom(BaseException):
    """An exception out of nowhere."""


def play(
    scenario: Scenario,
    size: int,
    schedule: dict[int, int],
    hands_over: bool = False,
    interrupt: int = 0,
    files: frozenset[str] = FILES,
    looks: int = 0,
) -> Stage:
    """Play a scenario once, with a schedule; nothing may be in flight afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        stage = Stage(schedule, files, ("interrupted", interrupt, Boom) if interrupt else None)
        on_stage(stage, patch, hands_over, looks)
        stage.is_recording = False
        try:
            ranks = Ranks(stage, size)
            # Until all engines are asleep.
            stage.play(lambda: stage.sleep(1e-6))
            stage.is_recording, stage.clock = True, 0.0
            scenario(stage, ranks)
            # A rank that must be told by the clock is told by its next tick.
            assert stage.clock < 0.5
            assert [engine.in_flight() for engine in ranks.engines] == [[]] * size
            ranks.stop()
        finally:
            stage.close()
    return stage


def play_all(scenario: Scenario, size: int, hands_over: bool = False, most: int = 1, **more: Any) -> int:
    """Play every schedule that differs from the usual in one moment, or in several; return how many there are."""

    def run(schedule: dict[int, int]) -> list[int]:
        return play(scenario, size, schedule, hands_over, **more).choices

    return sum(1 for _ in schedules(run, most))


def play_many(scenario: Scenario, size: int, hands_over: bool = False, **more: Any) -> None:
    """Play schedules that differ from the usual in a few moments, always the same ones."""
    choices = play(scenario, size, {}, hands_over, **more).choices
    chance = random.Random(size)
    for _ in range(_DRAWN):
        moments = chance.sample(range(len(choices)), min(chance.randint(1, _DEPTH), len(choices)))
        play(scenario, size, {moment: chance.randint(1, 3) for moment in moments}, hands_over, **more)


def raise_all(actors: list[Actor], *allowed: type[BaseException]) -> None:
    for actor in actors:
        if actor.error is not None and not isinstance(actor.error, allowed):
            raise actor.error


def once(ranks: Ranks, rank: int, name: str = "x") -> list[float]:
    return ranks.wait(rank, ranks.submit(rank, name))


def on_all(ranks: Ranks, act: Callable[[int], Any], first: int = 0) -> Iterator[Callable[[], Any]]:
    for rank in range(first, len(ranks.engines)):
        yield lambda rank=rank: act(rank)
