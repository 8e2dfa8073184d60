"""Steps of ``hvd.elastic.step``: done on all ranks, or without effect."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest
from elastic_double import Job, Told, failing

import horovod.numpy as hvd
from horovod.bindings.elastic.rates import LearningRateScale
from horovod.bindings.elastic.run import run
from horovod.bindings.elastic.shard import shard
from horovod.bindings.elastic.state import ObjectState
from horovod.bindings.elastic.step import decorators, step
from horovod.errors import PeerLostError, RequestError


def test_a_failed_step_has_no_effect_and_is_kept(job: Job) -> None:
    """Random numbers and attributes are those of a run without the failure."""
    drawn: list[Any] = []
    failures = {3: PeerLostError("x"), 6: PeerLostError("y")}
    calls = [0]

    @step
    def one(state: Told) -> None:
        calls[0] += 1
        state.batch += 1
        numbers = (random.random(), np.random.rand())
        if error := failures.get(calls[0]):
            raise error
        drawn.append(numbers)

    @run
    def train(state: Told) -> None:
        while state.batch < 6:
            one(state)

    def seeded() -> None:
        random.seed(1)
        np.random.seed(1)

    seeded()
    state = Told(job.events, batch=0)
    train(state)
    assert calls[0] == 8
    assert state.progress == 6
    assert "restore" not in job.events
    assert [event for event in job.events if event[0] == "renew"] == [("renew", 0), ("renew", 2), ("renew", 4)]
    seeded()
    assert drawn == [(random.random(), np.random.rand()) for _ in range(6)]


def test_arrays_of_a_failed_step_are_as_before(job: Job) -> None:
    weights, whole, fixed = np.zeros(3), np.arange(6.0).reshape(2, 3), np.ones(2)
    fixed.flags.writeable = False
    state = hvd.elastic.NumpyState(weights=weights, columns=whole.T, fixed=fixed, batch=0)
    failures = {2: PeerLostError("x"), 4: PeerLostError("y")}
    calls = [0]

    @step
    def one(state: Any) -> None:
        calls[0] += 1
        state.weights += 1
        state.columns[0, 1] = state.columns[0, 1] * 2
        state.columns = state.columns + 1 if calls[0] == 2 else state.columns
        if error := failures.get(calls[0]):
            raise error
        state.batch += 1

    @run
    def train(state: Any) -> None:
        while state.batch < 3:
            one(state)

    train(state)
    assert calls[0] == 5
    assert state.weights is weights
    assert (weights.tolist(), whole.tolist()) == ([3.0] * 3, [[0.0, 1.0, 2.0], [24.0, 4.0, 5.0]])


def test_a_new_rank_gets_the_rates_of_the_last_completed_step(job: Job) -> None:
    """A step that has changed the rate fails, and a rank joins in the same change."""
    groups, sent, calls = [{"lr": 1.0}], list[Any](), [0]
    scale = LearningRateScale(groups, reference_size=2, ramp_steps=4)
    state = ObjectState(lambda value: sent.append((value, groups[0]["lr"])) or value, lambda: 0, scale=scale)
    job.behind = [(), (1,)]

    @step
    def one(state: Any) -> None:
        calls[0] += 1
        state.scale.step()
        if calls[0] == 2:
            raise PeerLostError("x")

    @run
    def train(state: Any) -> None:
        while state.progress < 3:
            one(state)

    train(state)
    values, rate = sent[-1]
    assert (values["scale"].state["factor"], rate) == (pytest.approx(0.9), pytest.approx(0.9))
    assert groups[0]["lr"] == scale.factor == pytest.approx(0.7)


def test_a_change_comes_between_two_steps(job: Job) -> None:
    sizes: list[tuple[int, int]] = []

    @step
    def one(state: Told) -> None:
        job.wants = state.progress in (1, 3)  # is seen while the step runs
        state.batch += 1

    @run
    def train(state: Told) -> None:
        while state.batch < 4:
            one(state)
            sizes.append((state.batch, job.number))

    state = Told(job.events, batch=0)
    train(state)
    assert sizes == [(1, 1), (2, 1), (3, 1), (4, 2)], "what follows a step is done before the change"
    state.batch = 3
    train(state)
    assert sizes[4:] == [(4, 3)], "the ranks have met after the last change was due"


@pytest.mark.parametrize("change_at", [0, 2])
@pytest.mark.parametrize("has_steps", [False, True])
@pytest.mark.parametrize("checks_in_use", [False, True])
def test_samples_are_used_once_if_ranks_change_between_commits(
    checks_in_use: bool, has_steps: bool, change_at: int, job: Job
) -> None:
    """A batch that the loop has taken counts, unless it waits for a declared step."""
    used: list[int] = []

    def use(state: Any, batch: Any) -> None:
        used.extend(batch.tolist())
        if checks_in_use:
            state.check_host_updates()

    one = step(use) if has_steps else use

    @run
    def train(state: Any) -> None:
        for number, batch in enumerate(state.batches):
            job.wants = (number, job.number) == (change_at, 1)
            if has_steps and not checks_in_use:
                state.check_host_updates()
            one(state, batch)
            if not (has_steps or checks_in_use):
                state.check_host_updates()

    train(ObjectState(lambda value: value, lambda: 0, batches=shard(np.arange(20), batch_size=4)))
    assert (used, job.number) == (list(range(20)), 2)


def test_an_error_between_steps_goes_back_to_the_last_step(job: Job) -> None:
    batches: list[int] = []

    @step
    def one(state: Told) -> None:
        state.batch += 1

    @run
    def train(state: Told) -> None:
        batches.append(state.batch)
        if len(batches) == 1:
            one(state)
            one(state)
            raise PeerLostError("in an average of metrics")
        if len(batches) == 2:
            state.commit()
            state.batch = 9
            raise PeerLostError("after a commit")

    train(Told(job.events, batch=0))
    assert batches == [0, 2, 2]
    assert job.events.count("restore") == 1


def test_a_step_that_cannot_be_undone_is_restored(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    state = Told(job.events, batch=0)
    state.undo = lambda: False  # type: ignore[method-assign]

    @step
    def one(state: Told) -> None:
        state.batch += 1
        if "restore" not in state.told and state.batch == 2:
            raise PeerLostError("x")

    @run
    def train(state: Told) -> int:
        while state.batch < 3:
            one(state)
        return state.progress

    assert train(state) == 3
    assert "restore" in job.events
    assert "after it had changed parameters" in caplog.text


def test_a_step_within_a_step_is_an_error(job: Job) -> None:
    @step
    def inner(state: Told) -> None:
        pass

    @step
    def outer(state: Told) -> None:
        with pytest.raises(ValueError, match=r"inner\(\) is called within another step"):
            inner(state)

    state = Told(job.events, batch=0)
    run(outer)(state)
    run(inner)(state)
    assert state.progress == 2


def test_a_step_needs_a_state() -> None:
    with pytest.raises(TypeError, match=r"train\(\) is a step of hvd.elastic.step and takes a state"):

        @step
        def train(batch: int) -> None:
            pass

        train(3)


def _batches(state: Any) -> Any:
    yield state


async def _later(state: Any) -> None:
    pass


@pytest.mark.parametrize("wrong", [3, _batches, _later])
@pytest.mark.parametrize(("decorate", "what"), [(run, "the training function"), (step, "a function")])
def test_only_a_function_whose_call_runs_it_is_decorated(decorate: Any, what: str, wrong: Any) -> None:
    """The body of the others would run outside of the training or of the step."""
    name = getattr(wrong, "__name__", "int")
    for mine in (decorate, decorators(contextlib.nullcontext)[decorate is step]):
        with pytest.raises(ValueError, match=rf"takes {what}, which .* Received: {name} \(at {__file__}:"):
            mine(wrong)


def test_a_step_with_another_state_than_the_training_is_an_error(job: Job) -> None:
    """A membership change would stop this step again and again, and a new rank would never get its state."""

    @step
    def one(state: Told) -> None:
        state.batch += 1

    @run
    def train(state: Told, other: Told) -> None:
        one(state)
        one(other)

    state, other = Told(job.events, batch=0), Told(job.events, batch=0)
    with pytest.raises(RequestError, match=rf"one\(\) has got another state than .* \(at {__file__}:"):
        train(state, other)
    assert (state.batch, other.batch) == (1, 0)


def test_nothing_is_sent_where_no_rank_is_behind(job: Job) -> None:
    sent: list[Any] = []
    state = ObjectState(lambda value: sent.append(value) or value, lambda: 0, batch=0)
    job.behind = [(0,), (), (0,)]
    state.told = job.events
    run(failing(PeerLostError("x"), PeerLostError("y")))(state)
    assert [value for value in sent if isinstance(value, dict)] == [{"batch": 0}, {"batch": 0}]
