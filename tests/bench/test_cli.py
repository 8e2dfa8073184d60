"""Every benchmark at smoke size, as a user would type it: that it runs and is right, never how fast."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import run

from horovod.bench.cases import PARTS
from horovod.bench.cli import main, parse

ROOT = Path(__file__).resolve().parents[2]
PYTHON = [sys.executable, "-m", "horovod.bench"]
SMALL = ["--sizes", "64,4K", "--rounds", "1", "--round-ms", "1"]


def bench(
    tmp_path: Path, *words: str, start: list[str] | None = None, folder: Path | None = None, **environment: str
) -> dict[str, Any]:
    """Run the benchmark and return what it wrote."""
    out = tmp_path / "out.json"
    code, output = run([*(start or PYTHON), *words, "--json", str(out)], folder or tmp_path, **environment)
    assert code == 0, output
    found: dict[str, Any] = json.loads(out.read_text())
    assert found["kind"] == words[0]
    assert found["command"].startswith(f"python -m horovod.bench {words[0]}")
    assert found["host"]["cores"] >= 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("op", "others"), [("allreduce", "gloo,mpich,openmpi"), ("async", "gloo")])
def test_collectives_of_all_contenders(op: str, others: str, tmp_path: Path) -> None:
    batch = ["--batch", "3"] if op == "async" else []
    found = bench(tmp_path, op, *SMALL, *batch, "--arena", "--against", others, "--np", "2", folder=ROOT)
    assert [row["nbytes"] for row in found["rows"]] == [64, 4096]
    for row in found["rows"]:
        assert {"horovod", "horovod arena", "gloo"} <= set(row["results"])
        assert set(row["results"]) | set(row["skipped"]) == {"horovod", "horovod arena", *others.split(",")}


@pytest.mark.slow
def test_collectives_of_half_precision_inside_a_launched_job(tmp_path: Path) -> None:
    start = ["horovodrun", "-np", "3", *PYTHON]
    found = bench(tmp_path, "allreduce", *SMALL, "--dtype", "bfloat16,float16", start=start)
    assert found["np"] == 3
    assert [row["dtype"] for row in found["rows"]] == ["bfloat16"] * 2 + ["float16"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "backend", "ways"),
    [
        ("tensorflow", "", {"horovod", "mwms"}),
        ("jax", "", {"horovod", "jax gloo"}),
        ("keras", "torch", {"horovod", "ddp"}),
    ],
)
def test_training_of_a_framework_agrees_with_its_own(
    framework: str, backend: str, ways: set[str], tmp_path: Path
) -> None:
    words = ("train", "--framework", framework, "--tiny", "--models", "mlp", "--rounds", "1", "--steps", "1")
    found = bench(tmp_path, *words, folder=ROOT, **({"KERAS_BACKEND": backend} if backend else {}))
    assert (found["framework"], found.get("backend", "")) == (framework, backend)
    assert set(found["rows"][0]["results"]) == {"no communication", *ways}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "columns"),
    [
        ("tensorflow", {"horovod eager", "horovod function", "empty callback", "mwms ring"}),
        ("jax", {"horovod eager", "horovod jit", "empty callback", "jax gloo"}),
    ],
)
def test_allreduce_of_a_framework_beside_its_own(framework: str, columns: set[str], tmp_path: Path) -> None:
    words = ("allreduce", "--framework", framework, "--sizes", "64", "--rounds", "1", "--round-ms", "1")
    [row] = bench(tmp_path, *words, folder=ROOT)["rows"]
    assert set(row["results"]) == {"horovod numpy", *columns}


@pytest.mark.parametrize("words", ["train --framework jax", "allreduce --against gloo,mpich"])
def test_frameworks_and_mpi_need_a_checkout(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "benchmarks" else object())
    assert main(words.split()) == 2
    assert "run this in the root of a checkout" in capsys.readouterr().err
    assert parse([]).against == ("gloo",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("horovodrun -np 2 python benchmarks/timeline.py tiny-mlp", "flight recorder"),
        ("horovodrun -np 2 python benchmarks/optimizer.py tiny-mlp", "ddp with zero"),
        ("horovodrun -np 2 python benchmarks/idle.py 0.2", "rank 1: "),
        ("python benchmarks/memory.py tiny-mlp 2", "ddp"),
        ("python benchmarks/control.py 4 2 3", "leader of another host"),
    ],
)
def test_a_benchmark_of_the_checkout(command: str, said: str) -> None:
    code, output = run(command, ROOT)
    assert code == 0 and said in output, output


@pytest.mark.slow
def test_training_agrees_with_ddp(tmp_path: Path) -> None:
    found = bench(tmp_path, "train", "--tiny", "--rounds", "1", "--steps", "1")
    assert [row["model"] for row in found["rows"]] == ["mlp", "resnet", "gpt"]
    assert all(set(row["results"]) == {"no communication", "horovod", "ddp"} for row in found["rows"])


@pytest.mark.slow
def test_a_profile_accounts_for_the_whole_call(tmp_path: Path) -> None:
    rows = bench(tmp_path, "profile", "--sizes", "64,64K", "--rounds", "1")["rows"]
    assert [row["nbytes"] for row in rows] == [64, 65536]
    for row in rows:
        assert set(row["results"]) == {"horovod", "horovod arena"}
        for parts in row["results"].values():
            assert all(parts[f"{part}_s"] > 0 for part in PARTS), parts


@pytest.mark.slow
def test_a_network_needs_several_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["network"]) == 2
    assert "network measures between hosts; name them with -H a:1,b:1" in capsys.readouterr().err
    code, output = run(["horovodrun", "-np", "2", *PYTHON, "network", "--rounds", "1"], tmp_path)
    assert code != 0 and "expected several hosts, got one" in output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["allreduce", "--sizes", "many"], "not a size"),
        (["allreduce", "--dtype", "complex64"], "complex64"),
        (["allreduce", "--against", "nccl"], "gloo, mpich, openmpi"),
        (["train", "--models", "mlp=x"], "mlp=x"),
        (["train", "--models", ""], "expected at least one of mlp, resnet, gpt"),
        (["train", "--np", "0"], "expected at least 1, got 0"),
        (["train", "--np", "two"], "-np/--np: expected a number, got 'two'"),
        (["profile", "--threads", "-1"], "expected at least 0, got -1"),
        (["allreduce", "--round-ms", "nan"], "expected at least 0, got nan"),
        (["fly"], "fly"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(words)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_an_error_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, why in ((tmp_path, "Is a directory"), (tmp_path / "none" / "a.json", "No such file or directory")):
        assert main(["allreduce", "--json", str(place)]) == 2
        assert f"--json {place} cannot be written: {why}" in capsys.readouterr().err


def test_flags_alone_are_for_the_usual_benchmark() -> None:
    for args in (parse([]), parse(["-np", "3"])):
        assert (args.command, args.arena, args.against) == ("allreduce", True, ("gloo", "mpich", "openmpi"))
    assert parse(["-np", "3"]).np == 3


def test_without_torch_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["allreduce"]) == 2
    assert "torch is not installed; pip install torch" in capsys.readouterr().err
