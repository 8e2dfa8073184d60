"""The benchmarks of JAX: models as large as torch's, and every way gives the right result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import run
from harness import run_ranks


def _sizes() -> dict[str, float]:
    import jax

    from horovod.bench.cases import MODELS
    from horovod.bench.models_jax import make_task

    with pytest.raises(ValueError, match="no model 'vgg'"):
        make_task("vgg", 0)
    tasks = {name: make_task(name, 0) for name in MODELS}
    return {name: sum(leaf.size for leaf in jax.tree.leaves(task.params)) / 1e6 for name, task in tasks.items()}


def test_the_models_have_the_sizes_of_those_of_torch() -> None:
    [millions] = run_ranks(1, _sizes, framework="jax")
    assert 24.5 < millions["mlp"] < 25.5
    assert 2.5 < millions["resnet"] < 3.5
    assert 16.5 < millions["gpt"] < 17.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "columns"),
    [
        (
            "allreduce --sizes 64 --round-ms 1",
            {"horovod numpy", "horovod eager", "horovod jit", "empty callback", "jax gloo"},
        ),
        ("train --tiny --models mlp --steps 1", {"no communication", "horovod", "jax gloo"}),
    ],
)
def test_horovod_and_its_peer_are_measured_in_one_run(what: str, columns: set[str], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    code, output = run(f"python -m horovod.bench {what} --framework jax --rounds 1 --json {file}", tmp_path)
    assert code == 0, output
    [row] = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert set(row["results"]) == columns
    assert all(result["median_s"] > 0 for result in row["results"].values())
