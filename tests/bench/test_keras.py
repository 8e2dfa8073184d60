"""The benchmarks of Keras: every way trains the same on each backend, and peers are measured in the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import run
from harness import run_ranks

from horovod.bench.cases import Case


def _measured(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    import horovod.numpy as hvd
    from horovod.bench import on_keras
    from horovod.bench.collective import Plan, run_cases
    from horovod.bench.control import HorovodControl
    from horovod.bench.gloo import stop_gloo
    from horovod.bench.stepping import run_train

    control = HorovodControl(hvd)
    # MultiWorkerMirroredStrategy, the fourth, starts processes of its own: tests/bench/test_cli.py has it.
    arms = on_keras.arms(control)[:3]
    [trained] = run_train([name], on_keras.make_task, arms, control, lambda *_: None, rounds=1, steps=2, tiny=True)
    if on_keras.BACKEND == "torch":
        stop_gloo(control)
    contenders = on_keras.contenders(control)
    [reduced] = run_cases([Case("allreduce", 64)], contenders, control, Plan(1, 1e-3), lambda *_: None)
    for each in contenders:
        each.close()
    return trained, reduced


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "model", "beside", "peer"),
    [("tensorflow", "gpt", "loop, no communication", "mwms ring"), ("torch", "resnet", "ddp", "gloo")],
)
def test_ways_agree_and_are_measured(backend: str, model: str, beside: str, peer: str) -> None:
    (trained, reduced), _ = run_ranks(2, _measured, model, framework=f"keras-{backend}")
    assert list(trained["results"]) == ["no communication", "horovod", beside]
    assert [one["calls"] for one in trained["results"].values()] == [2, 2, 2]
    assert list(reduced["results"]) == ["horovod numpy", "horovod keras", peer]


@pytest.mark.slow
def test_training_on_jax_agrees_with_its_own_data_parallelism(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = f"python -m horovod.bench train --framework keras --tiny --models mlp --rounds 1 --steps 1 --json {file}"
    code, output = run(command, tmp_path, KERAS_BACKEND="jax")
    assert code == 0, output
    assert "train of keras on jax, 2 ranks" in output
    result = json.loads(file.read_text(encoding="utf-8"))
    assert (result["framework"], result["backend"]) == ("keras", "jax")
    [row] = result["rows"]
    assert set(row["results"]) == {"no communication", "horovod", "jax gloo"}


def _sizes() -> dict[str, float]:
    from horovod.bench.cases import MODELS
    from horovod.bench.models_keras import make_task

    with pytest.raises(ValueError, match="no model 'vgg'"):
        make_task("vgg", 0)
    return {name: make_task(name, 0).model.count_params() / 1e6 for name in MODELS}


def test_the_models_have_the_sizes_of_those_of_torch() -> None:
    [millions] = run_ranks(1, _sizes, framework="keras-tensorflow")
    assert 24.5 < millions["mlp"] < 25.5
    assert 2.5 < millions["resnet"] < 3.5
    assert 16.5 < millions["gpt"] < 17.5
