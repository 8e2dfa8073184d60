"""Elastic jobs of real ranks: some are killed, others join; the values are those of a training without losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from elastic_job import ElasticJob
from elastic_train import (
    gathered_shards,
    horovod_script,
    kept_things,
    linear_from,
    parts,
    snapshot,
    train_on,
    train_steps,
)
from harness import on_ranks, run_ranks

import horovod.torch as hvd
from horovod.core.membership_events import Policy

STEPS = 6


def flat(values: Any) -> Any:
    """Values as lists, to compare to the bit."""
    if isinstance(values, torch.Tensor):
        return values.tolist()
    if isinstance(values, dict):
        return {key: flat(value) for key, value in values.items()}
    return [flat(value) for value in values] if isinstance(values, list | tuple) else values


def alike(seen: list[dict[str, Any]], step: int) -> None:
    """All processes had the same parameters and optimizer state after a step."""
    states = [flat({k: v for k, v in each["history"][step].items() if k != "generator"}) for each in seen]
    # Each rank has its own averages of batch norm, and its own random numbers.
    for state in states:
        state["model"] = {name: value for name, value in state["model"].items() if "running" not in name}
    assert all(state == states[0] for state in states)


def undisturbed(starts: list[dict[str, Any]], first: int) -> dict[str, Any]:
    """Train from given states on, without elastic; return the last state."""
    hvd.init()
    model, optimizer = parts()
    start = starts[hvd.rank()]
    model.load_state_dict(start["model"])
    optimizer.load_state_dict(start["optimizer"])
    torch.set_rng_state(start["generator"])
    for step in range(first, STEPS):
        train_on(model, optimizer, step)
    return snapshot(model, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "victim"), [("forward", 0), ("backward", 2), ("between", 2), ("end of step", 0)])
def test_survivors_go_on_as_if_the_lost_rank_had_never_been(place: str, victim: int) -> None:
    """The step is repeated by two of three ranks, to the bit as two ranks do it that were never three."""
    with ElasticJob(train_steps, Policy(3, minimum=2), {"a": 3}, ({victim: (place, 3, 1)}, STEPS)) as job:
        seen = sorted(job.values().values(), key=lambda each: each["rank"])
    assert [each["rank"] for each in seen] == [0, 1]
    for each in seen:
        assert each["progress"] == STEPS
        assert each["entries"] == 2
        # At the end of its step the lost rank had given all that the others needed of it.
        full = 4 if place == "end of step" else 3
        assert [each["sizes"][step] for step in range(1, STEPS + 1)] == [3] * full + [2] * (STEPS - full)
    for step in range(1, STEPS + 1):
        alike(seen, step)
    expected = run_ranks(2, undisturbed, [each["history"][full] for each in seen], full, init=False)
    assert [flat(each["history"][STEPS]) for each in seen] == flat(expected)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["callback", "forward"])  # tests/elastic/test_phases.py has others
def test_a_second_rank_is_lost_while_the_others_recover(place: str) -> None:
    deaths = {3: ("backward", 2, 1), 0: (place, 2, 2)}
    with ElasticJob(train_steps, Policy(4, minimum=2), {"a": 4}, (deaths, STEPS)) as job:
        seen = list(job.values().values())
    assert len(seen) == 2
    for each in seen:
        assert [each["sizes"][step] for step in range(1, STEPS + 1)] == [4, 4, 2, 2, 2, 2]
    for step in range(1, STEPS + 1):
        alike(seen, step)


@pytest.mark.slow
def test_a_new_process_goes_on_with_the_state_of_the_others() -> None:
    policy = Policy(3, minimum=2, cool_down_s=(0, 0))
    with ElasticJob(train_steps, policy, {"a": 3}, ({0: ("backward", 2, 1)}, STEPS, 3)) as job:
        seen = list(job.values().values())
    assert len(seen) == 3
    new = min(seen, key=lambda each: len(each["history"]))
    first = min(new["history"])
    assert first > 3
    last = max(new["history"])
    assert [each["sizes"][last] for each in seen] == [3, 3, 3]
    alike(seen, first)
    alike(seen, last)


def epochs_are_whole(seen: list[dict[str, Any]]) -> None:
    """Each epoch that a process has seen the end of had every sample, and repeated fewer than there were ranks."""
    for each in seen:
        for epoch, samples in each["used"].items():
            assert set(samples) == set(range(61)), f"epoch {epoch}"
            assert len(samples) <= 61 + 3
        last = seen[0]["epochs"] - 1
        assert each["used"][last] == seen[0]["used"][last]
        assert each["model"] == seen[0]["model"]


@pytest.mark.slow
def test_a_script_of_horovod_goes_back_to_its_commit() -> None:
    """Two ranks are lost in the middle of an epoch, between commits; new ones take their places."""
    policy = Policy(4, minimum=2, cool_down_s=(0, 0))
    with ElasticJob(horovod_script, policy, {"a": 4}, ({1: 5, 0: 7}, 3, 3, -1, 4)) as job:
        seen = list(job.values().values())
    epochs_are_whole(seen)
    assert [each["size"] for each in seen] == [4] * 4


@pytest.mark.slow
def test_a_rank_that_gets_sigterm_leaves_at_the_next_commit() -> None:
    with ElasticJob(horovod_script, Policy(3, minimum=2), {"a": 3}, ({}, 4, 2, 1)) as job:
        seen = {slot.number: value for slot, value in job.values().items()}
    left = seen.pop(1)
    assert left == {"resets": [], "left": ["told"], "code": 0}
    epochs_are_whole(list(seen.values()))
    assert [each["resets"] for each in seen.values()] == [[2], [2]]


@pytest.mark.slow
@pytest.mark.parametrize("host", [False, True], ids=["plain", "host_optimizer"])
def test_sets_tensors_and_shards_survive(host: bool) -> None:
    """Rank 2 of four is lost after a commit and one more step."""
    with ElasticJob(kept_things, Policy(4, minimum=2), {"a": 4}, (2, host)) as job:
        seen = sorted(job.values().values(), key=lambda each: each["rank"])
    assert len(seen) == 3
    expected = linear_from(seen[0]["model"], seen[0]["adam"])
    for each in seen:
        assert each["restored"] == each["model"]
        assert torch.allclose(torch.tensor(each["final"][0]), torch.tensor(expected[0]), rtol=0, atol=1e-6)
        assert each["final"] == seen[0]["final"]
        # Ranks 0, 1 and 3 of before are 0, 1 and 2 now.
        assert each["sets"] == [[0, 2], each["rank"] != 1, [1, 2], [0, 2]]
        # Sets keep their numbers, also where two have the same members now; the last was added again. The number of
        # the lost one, 4, is not given to another set: compiled programs may contain it.
        assert each["numbers"] == [1, None, 2, 5]
        assert each["count"] == 4
        assert each["after"] == [1, None, 6, [0, 1]]
        assert each["sum"] == 0 + 1 + 3
        assert each.get("even") == ([2.0, 2.0] if each["rank"] != 1 else None)
        assert "no rank of the process set of rank 2 is left" in each["alone"]
        assert "was begun before" in each["handle"]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["commit", "leave", "between"])
def test_all_go_back_to_a_whole_commit_when_shards_are_lost(place: str) -> None:
    """A rank is lost before the others have its part of the optimizer's state, wherever they are."""
    with ElasticJob(gathered_shards, Policy(4, minimum=2), {"a": 4}, (place,)) as job:
        seen = [value for value in job.values().values() if value is not None]
    assert len(seen) == (2 if place == "leave" else 3)
    ((undisturbed, _),) = run_ranks(1, gathered_shards, "", init=False)
    for parameters, begun in seen:
        assert begun == [0, 2]
        assert parameters == seen[0][0]
        for found, expected in zip(parameters, undisturbed, strict=True):
            assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.slow
@on_ranks(2, returns=[[1.0, {"calls": 3}]] * 2)
def test_a_sync_sends_what_modules_keep_besides_tensors() -> list[Any]:
    hvd.init()

    class Counting(torch.nn.Linear):
        extra: Any = {"calls": 3}  # noqa: RUF012

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    model = Counting(1, 1)
    if hvd.rank() == 0:
        torch.nn.init.ones_(model.weight)
    else:
        model.extra = torch.zeros(5)
    hvd.elastic.TorchState(model).sync()
    return [float(model.weight), model.extra]
