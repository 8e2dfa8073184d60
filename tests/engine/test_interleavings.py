"""Threads of a rank, and of two ranks in one process, that change at chosen lines: all ways, or many, to do so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from interleaving import Lock, Stage, Stuck, schedules
from pairs import FILES, Ranks
from plays import Scenario, on_all, once, play, play_all, play_many, raise_all

from horovod.core.coordinator import LogEntry
from horovod.engine.handles import Handle
from horovod.engine.loop import Loop
from horovod.engine.state import EngineState
from horovod.errors import HorovodInternalError, NotInitializedError, PeerLostError

# -- what happens at the same time ---------------------------------------------------------------------------------


def submit_against_tick(stage: Stage, ranks: Ranks) -> None:
    """Every rank submits and waits, while its engine's thread looks for work; no wake-up may get lost."""
    actors = stage.play(*on_all(ranks, lambda rank: once(ranks, rank)))
    raise_all(actors)
    assert [actor.result for actor in actors] == [ranks.total] * len(actors)
    assert stage.clock == 0, "somebody slept although there was work"


def patient_calls(stage: Stage, ranks: Ranks) -> None:
    """Synchronous calls without a name, one after the other."""
    actors = stage.play(*on_all(ranks, lambda rank: [ranks.run(rank) for _ in range(2)]))
    raise_all(actors)
    assert [actor.result for actor in actors] == [[ranks.total] * 2] * len(actors)
    assert stage.clock == 0, "somebody slept although there was work"


def patient_calls_of_two_threads(stage: Stage, ranks: Ranks) -> None:
    """Two threads of every rank make synchronous calls; not all ranks come to them in the same order."""
    calls = [lambda rank=rank, name=name: ranks.run(rank, name) for rank in range(len(ranks.engines)) for name in "ab"]
    actors = stage.play(*calls)
    raise_all(actors)
    assert [actor.result for actor in actors] == [ranks.total] * len(actors)
    assert stage.clock < 0.001, "somebody slept although there was work"


def patient_call_beside_a_wait(stage: Stage, ranks: Ranks) -> None:
    """One thread makes a synchronous call, another one submits and waits; the other ranks begin with the second."""
    others = on_all(ranks, lambda rank: [ranks.run(rank, name) for name in "ba"], 1)
    actors = stage.play(lambda: ranks.run(0, "a"), lambda: once(ranks, 0, "b"), *others)
    raise_all(actors)
    assert [actor.result for actor in actors[:2]] == [ranks.total] * 2
    assert stage.clock < 0.001, "somebody slept although there was work"


def two_threads_of_a_rank(stage: Stage, ranks: Ranks) -> None:
    """Two threads wait for operations of their own; the other ranks submit them in another order."""

    def other(rank: int) -> list[list[float]]:
        handles = [ranks.submit(rank, name) for name in "ba"]
        return [ranks.wait(rank, handle) for handle in handles]

    actors = stage.play(lambda: once(ranks, 0, "a"), lambda: once(ranks, 0, "b"), *on_all(ranks, other, 1))
    raise_all(actors)
    assert [actor.result for actor in actors[:2]] == [ranks.total] * 2
    assert stage.clock < 0.001, "somebody slept although there was work"


def two_threads_for_one_handle(stage: Stage, ranks: Ranks) -> None:
    """Two threads wait for the same."""
    handles: list[Handle] = []

    def begin() -> None:
        handles.append(ranks.submit(0, "x"))

    stage.play(begin)

    def wait() -> list[float]:
        return ranks.wait(0, handles[0])

    actors = stage.play(wait, wait, *on_all(ranks, lambda rank: once(ranks, rank), 1))
    raise_all(actors)
    assert [actor.result for actor in actors] == [ranks.total] * len(actors)
    assert stage.clock < 0.001, "somebody slept although there was work"


def one_of_two_threads_is_served_first(stage: Stage, ranks: Ranks) -> None:
    """Two threads wait; the other ranks come to the second operation only when the first one is over."""
    others = on_all(ranks, lambda rank: [once(ranks, rank, name) for name in "ba"], 1)
    actors = stage.play(lambda: once(ranks, 0, "a"), lambda: once(ranks, 0, "b"), *others)
    raise_all(actors)
    assert [actor.result for actor in actors[:2]] == [ranks.total] * 2
    assert stage.clock < 0.001, "somebody slept although there was work"


def submit_beside_a_wait(stage: Stage, ranks: Ranks) -> None:
    """One thread submits what it does not wait for yet, another one waits; the other ranks need both."""
    handles: list[Handle] = []
    others = on_all(ranks, lambda rank: [once(ranks, rank, name) for name in "ba"], 1)
    raise_all(stage.play(lambda: handles.append(ranks.submit(0, "a")), lambda: once(ranks, 0, "b"), *others))
    assert stage.clock < 0.001, "somebody slept although there was work"
    raise_all(stage.play(lambda: ranks.wait(0, handles[0])))


def wait_against_shutdown(stage: Stage, ranks: Ranks) -> None:
    """Two threads leave while two others have something in flight, on rank 0; the others are told, if there are any."""
    leave = ranks.engines[0].stop
    actors = stage.play(
        lambda: once(ranks, 0, "x"),
        lambda: leave("bye"),
        lambda: ranks.run(0, "y"),
        lambda: leave("bye"),
        *on_all(ranks, lambda rank: once(ranks, rank), 1),
    )
    raise_all(actors[:4], NotInitializedError)
    raise_all(actors[4:], PeerLostError)
    assert actors[1].error is actors[3].error is None


def fail_against_submit(stage: Stage, ranks: Ranks) -> None:
    """An engine fails while its threads submit; each gets an error, and so do the other ranks."""
    last = len(ranks.engines) - 1

    def broken() -> LogEntry | None:
        raise HorovodInternalError("the log is gone")

    ranks.engines[last].link.channel.next = broken  # type: ignore[method-assign]
    actors = stage.play(
        lambda: once(ranks, last, "x"),
        lambda: ranks.run(last, "y"),
        lambda: once(ranks, last, ""),
        *on_all(ranks, lambda rank: once(ranks, rank) if rank < last else None),
    )
    raise_all(actors, HorovodInternalError)
    assert all(actor.error for actor in actors[:3])


def ask_against_submit(stage: Stage, ranks: Ranks) -> None:
    """Somebody asks what is in flight, while it changes."""

    def ask() -> None:
        for _ in range(2):
            assert len(ranks.engines[0].in_flight()) <= 2
            assert ranks.engines[0].stats().operations <= 2

    raise_all(stage.play(ask, *on_all(ranks, lambda rank: [once(ranks, rank, "") for _ in range(2)])))


def poll_against_tick(stage: Stage, ranks: Ranks) -> None:
    """A loop over poll finds it done, without ever waiting."""

    def act(rank: int) -> list[float]:
        handle = ranks.submit(rank, "x")
        while not ranks.engines[rank].poll(handle):
            assert stage.clock < 1
        return ranks.wait(rank, handle)

    actors = stage.play(*on_all(ranks, act))
    raise_all(actors)
    assert [actor.result for actor in actors] == [ranks.total] * len(actors)


SCENARIOS = [
    submit_against_tick,
    patient_calls,
    patient_calls_of_two_threads,
    patient_call_beside_a_wait,
    two_threads_of_a_rank,
    two_threads_for_one_handle,
    one_of_two_threads_is_served_first,
    submit_beside_a_wait,
    wait_against_shutdown,
    fail_against_submit,
    ask_against_submit,
    poll_against_tick,
]
HOW = pytest.mark.parametrize("hands_over", [False, True], ids=["does the work", "hands it over"])


@HOW
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_one_rank_alone(scenario: Scenario, hands_over: bool) -> None:
    assert play_all(scenario, 1, hands_over)


@pytest.mark.slow
@HOW
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_ranks(scenario: Scenario, hands_over: bool) -> None:
    play_many(scenario, 2, hands_over)


@pytest.mark.slow
@HOW
def test_two_ranks_that_submit_and_wait_at_every_moment(hands_over: bool) -> None:
    assert play_all(submit_against_tick, 2, hands_over) > 400


# -- that it finds what there was to find --------------------------------------------------------------------------

_HERE = frozenset({*FILES, str(Path(__file__))})


def _found(scenario: Scenario, hands_over: bool, most: int) -> list[BaseException]:
    errors: list[BaseException] = []

    def run(schedule: dict[int, int]) -> list[int]:
        try:
            return play(scenario, 1, schedule, hands_over, files=_HERE).choices
        except (RuntimeError, AssertionError, Stuck) as error:
            errors.append(error)
            return []

    for _ in schedules(run, most):
        if errors:
            break
    return errors


def _asks(stage: Stage, ranks: Ranks) -> None:
    raise_all(stage.play(lambda: once(ranks, 0, ""), lambda: ranks.engines[0].in_flight()))


def test_it_finds_deques_that_change_while_they_are_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_flight(self: EngineState) -> list[Handle]:
        found = []
        for queue in (*self.unnamed.values(), self.inbox):
            for handle in queue:
                found.append(handle)
        return found

    monkeypatch.setattr(EngineState, "in_flight", in_flight)
    [error] = _found(_asks, hands_over=True, most=2)
    assert "mutated during iteration" in str(error)


def _two_finish(stage: Stage, ranks: Ranks) -> None:
    """Two threads end the same submission: the engine's that has ended, and one that submits too late."""
    handle = ranks.submit(0, "x")
    ranks.engines[0]._state.inbox.clear()
    ranks.engines[0]._state.clear()
    handle.waiters = [Lock(stage)]
    handle.waiters[0].acquire()
    raise_all(stage.play(handle.finish, handle.finish))


def test_it_finds_a_lock_that_is_looked_at_and_then_released(monkeypatch: pytest.MonkeyPatch) -> None:
    assert play_all(_two_finish, 1, most=2) > 20

    def wake(self: Handle) -> None:
        for waiter in self.waiters:
            if waiter.locked():
                waiter.release()

    monkeypatch.setattr(Handle, "wake", wake)
    [error] = _found(_two_finish, hands_over=True, most=2)
    assert "release unlocked lock" in str(error)


def test_it_finds_a_wake_up_that_gets_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    hand_over = Loop._hand_over

    def share(self: Loop, handle: Handle) -> Any:
        theirs = handle.waiters[:1]
        own = hand_over(self, handle)
        handle.waiters[:] = theirs or [own]
        return handle.waiters[0]

    monkeypatch.setattr(Loop, "_hand_over", share)
    [error] = _found(two_threads_for_one_handle, hands_over=True, most=2)
    assert "although there was work" in str(error)


def _many_at_once(stage: Stage, ranks: Ranks, states: list[bool]) -> None:
    run, first = ranks.engines[0].transport.run, Lock(stage)
    first.acquire()

    def running(*args: Any) -> int:
        states.append(first.locked())
        return run(*args)

    ranks.engines[0].transport.run = running  # type: ignore[method-assign]

    def act(rank: int) -> None:
        handles = [ranks.submit(rank, f"{number}") for number in range(100)]
        handles[0].waiters.append(first)
        for handle in handles:
            ranks.wait(rank, handle)

    raise_all(stage.play(*on_all(ranks, act)))


def test_who_waits_for_the_first_of_many_small_operations_is_woken_after_some_of_them() -> None:
    states: list[bool] = []
    play(lambda stage, ranks: _many_at_once(stage, ranks, states), 2, {}, hands_over=True)
    assert len(states) == 100
    assert states.count(True) == 64
