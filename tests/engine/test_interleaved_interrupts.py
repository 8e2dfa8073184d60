"""An exception out of nowhere in a call, at every line, while other threads and ranks go on at any."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from interleaving import Stage
from pairs import Ranks
from plays import Boom, Scenario, on_all, once, play, raise_all

from horovod.engine.handles import Handle


def wait_against_interrupt(stage: Stage, ranks: Ranks) -> None:
    """An exception comes out of nowhere in a call of rank 0: it is in flight or withdrawn, and the job goes on."""
    engine = ranks.engines[0]

    def interrupted() -> list[float] | None:
        handle: Handle | None = None
        try:
            handle = ranks.submit(0, "x")
            return ranks.wait(0, handle)
        except Boom:
            stage.go_on()
        if handle is None and not engine.stats().operations:
            handle = ranks.submit(0, "x")
        if handle is not None:
            return ranks.wait(0, handle)
        # Nobody has the handle; what is submitted next is done after it.
        return None

    _play_with_others(stage, ranks, interrupted)


def patient_call_against_interrupt(stage: Stage, ranks: Ranks) -> None:
    """As ``wait_against_interrupt``, in one step, and so without a handle."""
    engine = ranks.engines[0]

    def interrupted() -> list[float] | None:
        try:
            return ranks.run(0, "x")
        except Boom:
            stage.go_on()
        return None if engine.stats().operations else ranks.run(0, "x")

    _play_with_others(stage, ranks, interrupted)


def _play_with_others(stage: Stage, ranks: Ranks, interrupted: Callable[[], list[float] | None]) -> None:
    """Play it as rank 0, and the same operation on all other ranks; the job must go on afterwards."""
    actors = stage.play(
        interrupted,
        *on_all(ranks, lambda rank: once(ranks, rank), 1),
        names=" ".join(["interrupted", "b", "c"][: len(ranks.engines)]),
    )
    raise_all(actors)
    assert all(actor.result in (None, ranks.total) for actor in actors)
    assert _once_more(stage, ranks) == [ranks.total] * len(ranks.engines)


def _once_more(stage: Stage, ranks: Ranks) -> list[Any]:
    actors = stage.play(*on_all(ranks, lambda rank: once(ranks, rank, "again")))
    raise_all(actors)
    return [actor.result for actor in actors]


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scenario", [wait_against_interrupt, patient_call_against_interrupt])
def test_an_interrupt_at_every_line_while_others_go_on_at_any(scenario: Scenario, size: int) -> None:
    lines = 0
    while True:
        lines += 1
        chance = random.Random(lines)
        found: list[Stage] = []
        for _ in range(6):
            # Where it comes is about where the others go on.
            moments = {lines + chance.randint(-9, 9): chance.randint(1, 2) for _ in range(2)}
            found.append(play(scenario, size, moments, hands_over=True, interrupt=lines))
        if not any(stage.has_interrupted for stage in found):
            break
    assert lines > 10
