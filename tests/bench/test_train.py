"""The models, and the check that arms agree."""

from __future__ import annotations

import pytest
import torch
from bench_doubles import LocalAgreement

from horovod.bench.cases import MODELS
from horovod.bench.control import WrongResultError
from horovod.bench.models import Task, make_task
from horovod.bench.on_torch import local_arm, sgd, torch_arm
from horovod.bench.stepping import Arm, run_train


def nothing(done: int, total: int, text: str) -> None:
    """Progress that nobody watches."""


@pytest.mark.parametrize("name", MODELS)
def test_ranks_have_one_model_and_different_data(name: str) -> None:
    first, second = make_task(name, 0, tiny=True), make_task(name, 1, tiny=True)
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.inputs, second.inputs)
    assert torch.isfinite(first.loss(first.model))


def test_the_large_models_have_the_sizes_that_are_documented() -> None:
    millions = {name: sum(p.numel() for p in make_task(name, 0).model.parameters()) / 1e6 for name in MODELS}
    assert 24.5 < millions["mlp"] < 25.5
    assert 2.5 < millions["resnet"] < 3.5
    assert 16.5 < millions["gpt"] < 17.5


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no model 'vgg'"):
        make_task("vgg", 0)


@pytest.mark.parametrize("name", MODELS)
def test_arms_are_measured_and_compared(name: str) -> None:
    def twin_arm(task: Task) -> Arm:
        return torch_arm("twin", task, sgd(task.model))

    said: list[str] = []
    arms, tell = [local_arm, twin_arm], lambda done, total, text: said.append(text)
    [row] = run_train([name], make_task, arms, LocalAgreement(), tell, rounds=2, steps=2, tiny=True)
    assert f"{name}: first steps, twin" in said and f"{name}: round 2 of 2, twin" in said
    assert row["results"]["twin"]["calls"] == 4
    assert row["results"]["no communication"]["exposed_s"] == 0.0


def test_an_arm_that_trains_something_else_is_found_out() -> None:
    def idle_arm(task: Task) -> Arm:
        arm = torch_arm("idle", task, sgd(task.model))
        arm.step = lambda: None
        return arm

    def other_arm(task: Task) -> Arm:
        return torch_arm("other", task, sgd(task.model))

    with pytest.raises(WrongResultError, match="idle and other differ"):
        run_train(["mlp"], make_task, [local_arm, idle_arm, other_arm], LocalAgreement(), nothing, rounds=1, tiny=True)
