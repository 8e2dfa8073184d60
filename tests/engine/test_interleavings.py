"""Threads of a rank, and of two ranks in one process, that change at chosen lines: all ways, or many, to do so."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from interleaving import Actor, Lock, Stage, Stuck, schedules
from pairs import FILES, Ranks, on_stage

from horovod.engine.handles import Handle
from horovod.engine.log import LogRunner
from horovod.engine.ports import LogEntry
from horovod.engine.progress import Progress
from horovod.errors import HorovodInternalError, NotInitializedError, PeerLostError

Scenario = Callable[[Stage, Ranks], None]

#: How many schedules are drawn, and in how many moments each may differ from the usual.
_DRAWN, _DEPTH = 120, 3


class Boom(BaseException):
    """An exception out of nowhere."""


def _play(
    scenario: Scenario,
    size: int,
    schedule: dict[int, int],
    hands_over: bool = False,
    interrupt: int = 0,
    files: frozenset[str] = FILES,
) -> Stage:
    """Play a scenario once, with a schedule; nothing may be in flight afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        stage = Stage(schedule, files, ("interrupted", interrupt, Boom) if interrupt else None)
        on_stage(stage, patch, hands_over)
        stage.is_recording = False
        try:
            ranks = Ranks(stage, size)
            # Until all engines are asleep.
            stage.play(lambda: stage.sleep(1e-6))
            stage.is_recording, stage.clock = True, 0.0
            scenario(stage, ranks)
            # Who has to be told by the clock is told by its next tick.
            assert stage.clock < 0.5
            assert [engine.in_flight() for engine in ranks.engines] == [[]] * size
            ranks.stop()
        finally:
            stage.close()
    return stage


def _all(scenario: Scenario, size: int, hands_over: bool = False, most: int = 1, **more: Any) -> int:
    """Play every schedule that differs from the usual in one moment, or in several; return how many there are."""

    def run(schedule: dict[int, int]) -> list[int]:
        return _play(scenario, size, schedule, hands_over, **more).choices

    return sum(1 for _ in schedules(run, most))


def _many(scenario: Scenario, size: int, hands_over: bool = False, **more: Any) -> None:
    """Play schedules that differ from the usual in a few moments, always the same ones."""
    choices = _play(scenario, size, {}, hands_over, **more).choices
    chance = random.Random(size)
    for _ in range(_DRAWN):
        moments = chance.sample(range(len(choices)), min(chance.randint(1, _DEPTH), len(choices)))
        _play(scenario, size, {moment: chance.randint(1, 3) for moment in moments}, hands_over, **more)


def _raise_all(actors: list[Actor], *allowed: type[BaseException]) -> None:
    for actor in actors:
        if actor.error is not None and not isinstance(actor.error, allowed):
            raise actor.error


def _once(ranks: Ranks, rank: int, name: str = "x") -> list[float]:
    return ranks.wait(rank, ranks.submit(rank, name))


def _on_all(ranks: Ranks, act: Callable[[int], Any], first: int = 0) -> Iterator[Callable[[], Any]]:
    for rank in range(first, len(ranks.engines)):
        yield lambda rank=rank: act(rank)


# -- what happens at the same time ---------------------------------------------------------------------------------


def submit_against_tick(stage: Stage, ranks: Ranks) -> None:
    """Every rank submits and waits, while its engine's thread looks for work; no wake-up may get lost."""
    actors = stage.play(*_on_all(ranks, lambda rank: _once(ranks, rank)))
    _raise_all(actors)
    assert [actor.result for actor in actors] == [ranks.total] * len(actors)
    assert stage.clock == 0, "somebody slept although there was work"


def patient_calls(stage: Stage, ranks: Ranks) -> None:
    """Synchronous calls without a name, one after the other."""
    actors = stage.play(
        *_on_all(ranks, lambda rank: [ranks.wait(rank, ranks.submit(rank, "", patient=True)) for _ in range(2)])
    )
    _raise_all(actors)
    assert [actor.result for actor in actors] == [[ranks.total] * 2] * len(actors)
    assert stage.clock == 0, "somebody slept although there was work"


def two_threads_of_a_rank(stage: Stage, ranks: Ranks) -> None:
    """Two threads wait for operations of their own; the other ranks submit them in another order."""

    def other(rank: int) -> list[list[float]]:
        handles = [ranks.submit(rank, name) for name in "ba"]
        return [ranks.wait(rank, handle) for handle in handles]

    actors = stage.play(lambda: _once(ranks, 0, "a"), lambda: _once(ranks, 0, "b"), *_on_all(ranks, other, 1))
    _raise_all(actors)
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

    actors = stage.play(wait, wait, *_on_all(ranks, lambda rank: _once(ranks, rank), 1))
    _raise_all(actors)
    assert [actor.result for actor in actors] == [ranks.total] * len(actors)
    assert stage.clock < 0.001, "somebody slept although there was work"


def one_of_two_threads_is_served_first(stage: Stage, ranks: Ranks) -> None:
    """Two threads wait; the other ranks come to the second operation only when the first one is over."""
    others = _on_all(ranks, lambda rank: [_once(ranks, rank, name) for name in "ba"], 1)
    actors = stage.play(lambda: _once(ranks, 0, "a"), lambda: _once(ranks, 0, "b"), *others)
    _raise_all(actors)
    assert [actor.result for actor in actors[:2]] == [ranks.total] * 2
    assert stage.clock < 0.001, "somebody slept although there was work"


def submit_beside_a_wait(stage: Stage, ranks: Ranks) -> None:
    """One thread submits what it does not wait for yet, another one waits; the other ranks need both."""
    handles: list[Handle] = []
    others = _on_all(ranks, lambda rank: [_once(ranks, rank, name) for name in "ba"], 1)
    _raise_all(stage.play(lambda: handles.append(ranks.submit(0, "a")), lambda: _once(ranks, 0, "b"), *others))
    assert stage.clock < 0.001, "somebody slept although there was work"
    _raise_all(stage.play(lambda: ranks.wait(0, handles[0])))


def wait_against_shutdown(stage: Stage, ranks: Ranks) -> None:
    """Two threads leave while two others have something in flight, on rank 0; the others are told, if there are any."""
    leave = ranks.engines[0].stop
    actors = stage.play(
        lambda: _once(ranks, 0, "x"),
        lambda: leave("bye"),
        lambda: _once(ranks, 0, "y"),
        lambda: leave("bye"),
        *_on_all(ranks, lambda rank: _once(ranks, rank), 1),
    )
    _raise_all(actors[:4], NotInitializedError)
    _raise_all(actors[4:], PeerLostError)
    assert actors[1].error is actors[3].error is None


def fail_against_submit(stage: Stage, ranks: Ranks) -> None:
    """An engine fails while its threads submit; each gets an error, and so do the other ranks."""
    last = len(ranks.engines) - 1

    def broken() -> LogEntry | None:
        raise HorovodInternalError("the log is gone")

    ranks.engines[last].link.channel.next = broken  # type: ignore[method-assign]
    actors = stage.play(
        lambda: _once(ranks, last, "x"),
        lambda: _once(ranks, last, "y"),
        lambda: _once(ranks, last, ""),
        *_on_all(ranks, lambda rank: _once(ranks, rank) if rank < last else None),
    )
    _raise_all(actors, HorovodInternalError)
    assert all(actor.error for actor in actors[:3])


def ask_against_submit(stage: Stage, ranks: Ranks) -> None:
    """Somebody asks what is in flight, while it changes."""

    def ask() -> None:
        for _ in range(2):
            assert len(ranks.engines[0].in_flight()) <= 2
            assert ranks.engines[0].stats().operations <= 2

    _raise_all(stage.play(ask, *_on_all(ranks, lambda rank: [_once(ranks, rank, "") for _ in range(2)])))


def poll_against_tick(stage: Stage, ranks: Ranks) -> None:
    """Who polls in a loop finds it done, without ever waiting."""

    def act(rank: int) -> list[float]:
        handle = ranks.submit(rank, "x")
        while not ranks.engines[rank].poll(handle):
            assert stage.clock < 1
        return ranks.wait(rank, handle)

    actors = stage.play(*_on_all(ranks, act))
    _raise_all(actors)
    assert [actor.result for actor in actors] == [ranks.total] * len(actors)


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

    actors = stage.play(
        interrupted,
        *_on_all(ranks, lambda rank: _once(ranks, rank), 1),
        names=" ".join(["interrupted", "b", "c"][: len(ranks.engines)]),
    )
    _raise_all(actors)
    assert all(actor.result in (None, ranks.total) for actor in actors)
    assert _once_more(stage, ranks) == [ranks.total] * len(ranks.engines)


def _once_more(stage: Stage, ranks: Ranks) -> list[Any]:
    actors = stage.play(*_on_all(ranks, lambda rank: _once(ranks, rank, "again")))
    _raise_all(actors)
    return [actor.result for actor in actors]


SCENARIOS = [
    submit_against_tick,
    patient_calls,
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
    assert _all(scenario, 1, hands_over)


@HOW
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_ranks(scenario: Scenario, hands_over: bool) -> None:
    _many(scenario, 2, hands_over)


@pytest.mark.slow
@HOW
def test_two_ranks_that_submit_and_wait_at_every_moment(hands_over: bool) -> None:
    assert _all(submit_against_tick, 2, hands_over) > 400


@pytest.mark.parametrize("size", [1, 2])
def test_an_interrupt_at_every_line_while_others_go_on_at_any(size: int) -> None:
    lines = 0
    while True:
        lines += 1
        chance = random.Random(lines)
        found: list[Stage] = []
        for _ in range(6):
            # Where it comes is about where the others go on.
            moments = {lines + chance.randint(-9, 9): chance.randint(1, 2) for _ in range(2)}
            found.append(_play(wait_against_interrupt, size, moments, hands_over=True, interrupt=lines))
        if not any(stage.has_interrupted for stage in found):
            break
    assert lines > 10


# -- that it finds what there was to find --------------------------------------------------------------------------

_HERE = frozenset({*FILES, str(Path(__file__))})


def _found(scenario: Scenario, hands_over: bool, most: int) -> list[BaseException]:
    errors: list[BaseException] = []

    def run(schedule: dict[int, int]) -> list[int]:
        try:
            return _play(scenario, 1, schedule, hands_over, files=_HERE).choices
        except (RuntimeError, AssertionError, Stuck) as error:
            errors.append(error)
            return []

    for _ in schedules(run, most):
        if errors:
            break
    return errors


def _asks(stage: Stage, ranks: Ranks) -> None:
    _raise_all(stage.play(lambda: _once(ranks, 0, ""), lambda: ranks.engines[0].in_flight()))


def test_it_finds_deques_that_change_while_they_are_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_flight(self: LogRunner) -> list[Handle]:
        found = []
        for queue in (*self._unnamed.values(), self.inbox):
            for handle in queue:
                found.append(handle)
        return found

    monkeypatch.setattr(LogRunner, "in_flight", in_flight)
    [error] = _found(_asks, hands_over=True, most=2)
    assert "mutated during iteration" in str(error)


def _two_finish(stage: Stage, ranks: Ranks) -> None:
    """Two threads end the same submission: the engine's that has ended, and one that submits too late."""
    handle = ranks.submit(0, "x")
    ranks.engines[0]._log.inbox.clear()
    ranks.engines[0]._log._named.clear()
    handle.waiters = [Lock(stage)]
    handle.waiters[0].acquire()
    _raise_all(stage.play(handle.finish, handle.finish))


def test_it_finds_a_lock_that_is_looked_at_and_then_released(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _all(_two_finish, 1, most=2) > 20

    def wake(self: Handle) -> None:
        for waiter in self.waiters:
            if waiter.locked():
                waiter.release()

    monkeypatch.setattr(Handle, "wake", wake)
    [error] = _found(_two_finish, hands_over=True, most=2)
    assert "release unlocked lock" in str(error)


def test_it_finds_a_wake_up_that_gets_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    hand_over = Progress._hand_over

    def share(self: Progress, handle: Handle) -> Any:
        theirs = handle.waiters[:1]
        own = hand_over(self, handle)
        handle.waiters[:] = theirs or [own]
        return handle.waiters[0]

    monkeypatch.setattr(Progress, "_hand_over", share)
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

    _raise_all(stage.play(*_on_all(ranks, act)))


def test_who_waits_for_the_first_of_many_small_operations_is_woken_after_some_of_them() -> None:
    states: list[bool] = []
    _play(lambda stage, ranks: _many_at_once(stage, ranks, states), 2, {}, hands_over=True)
    assert len(states) == 100
    assert states.count(True) == 64
