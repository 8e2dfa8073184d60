"""Every benchmark at smoke size, as a user would type it: that it runs and is right, never how fast."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from commands import run

from horovod.bench.cases import OPS, PARTS
from horovod.bench.cli import main, parse
from horovod.bench.events import result

PYTHON = [sys.executable, "-m", "horovod.bench"]
SMALL = ["--sizes", "64,4K", "--rounds", "1", "--round-ms", "1"]


def bench(tmp_path: Path, *words: str, start: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark and return what it wrote."""
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    code, output = run([*(start or PYTHON), *words, "--json", str(out), "--plot", str(plot)], tmp_path)
    assert code == 0, output
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")
    found: dict[str, Any] = json.loads(out.read_text())
    assert found["kind"] == words[0]
    assert found["command"].startswith(f"python -m horovod.bench {words[0]}")
    assert found["host"]["cores"] >= 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_collectives_of_all_contenders(op: str, tmp_path: Path) -> None:
    batch = ["--batch", "3"] if op == "async" else []
    found = bench(tmp_path, op, *SMALL, *batch, "--arena", "--against", "gloo,mpich,openmpi", "--np", "2")
    assert [row["nbytes"] for row in found["rows"]] == [64, 4096]
    for row in found["rows"]:
        assert {"horovod", "horovod arena", "gloo"} <= set(row["results"])
        everybody = {"memory sweep", "horovod", "horovod arena", "gloo", "mpich", "openmpi"}
        assert set(row["results"]) | set(row["skipped"]) == everybody


@pytest.mark.slow
def test_collectives_of_half_precision_inside_a_launched_job(tmp_path: Path) -> None:
    start = ["horovodrun", "-np", "3", *PYTHON]
    found = bench(tmp_path, "allreduce", *SMALL, "--dtype", "bfloat16,float16", start=start)
    assert found["np"] == 3
    assert [row["dtype"] for row in found["rows"]] == ["bfloat16"] * 2 + ["float16"] * 2


@pytest.mark.slow
def test_allreduce_of_tensorflow_beside_its_own_ring(tmp_path: Path) -> None:
    found = bench(tmp_path, "allreduce", "--framework", "tensorflow", *SMALL)
    assert found["framework"] == "tensorflow"
    for row in found["rows"]:
        ours = {"horovod numpy", "horovod eager", "horovod function"}
        assert set(row["results"]) == ours | {"empty callback", "mwms ring"}
        assert set(row["ratios"]) == ours


@pytest.mark.slow
def test_training_of_tensorflow_agrees_with_its_own_strategy(tmp_path: Path) -> None:
    found = bench(tmp_path, "train", "--framework", "tensorflow", "--tiny", "--rounds", "1", "--steps", "1")
    assert [row["model"] for row in found["rows"]] == ["mlp", "resnet", "gpt"]
    assert all(set(row["results"]) == {"no communication", "horovod", "mwms"} for row in found["rows"])


@pytest.mark.slow
def test_training_agrees_with_ddp(tmp_path: Path) -> None:
    found = bench(tmp_path, "train", "--tiny", "--rounds", "1", "--steps", "1")
    assert [row["model"] for row in found["rows"]] == ["mlp", "resnet", "gpt"]
    assert all(set(row["results"]) == {"no communication", "horovod", "ddp"} for row in found["rows"])


@pytest.mark.slow
def test_optimizers_that_share_their_state_agree(tmp_path: Path) -> None:
    [row] = bench(tmp_path, "optimizer", "--tiny", "--models", "mlp", "--rounds", "1", "--steps", "1")["rows"]
    held = {name: one["state_bytes"] for name, one in row["results"].items()}
    assert set(held) == {"no communication", "horovod", "host_optimizer", "host_optimizer=model", "ddp with zero"}
    assert held["host_optimizer"] == held["host_optimizer=model"] < 0.6 * held["horovod"]


@pytest.mark.slow
def test_being_observed(tmp_path: Path) -> None:
    [row] = bench(tmp_path, "timeline", "--tiny", "--models", "gpt", "--rounds", "2", "--steps", "2")["rows"]
    assert set(row["results"]) == {"no timeline", "timeline", "flight recorder"}
    assert row["operations"] >= 1
    # The thread looks 25 times a second: it need not have looked in turns as short as these.
    assert row["results"]["timeline"]["busy_s"] >= 0 < row["results"]["flight recorder"]["beyond_s"]


@pytest.mark.slow
def test_a_profile_accounts_for_the_whole_call(tmp_path: Path) -> None:
    rows = bench(tmp_path, "profile", "--sizes", "64,64K", "--rounds", "1")["rows"]
    assert [row["nbytes"] for row in rows] == [64, 65536]
    for row in rows:
        assert row["copy_s"] > 0 < row["add_s"]
        assert set(row["results"]) == {"horovod", "horovod arena"}
        for parts in row["results"].values():
            assert all(parts[f"{part}_s"] > 0 for part in PARTS), parts


@pytest.mark.slow
def test_startup(tmp_path: Path) -> None:
    names = {row["name"] for row in bench(tmp_path, "startup", "--rounds", "1")["rows"]}
    assert {"rank: hvd.init()", "horovodrun beyond python", "whole job beyond torchrun's"} <= names


def test_control(tmp_path: Path) -> None:
    rows = bench(tmp_path, "control", "--ranks", "4", "--per-host", "2", "--tensors", "3")["rows"]
    assert next(row["name"] for row in rows) == "hub: read, decide, write"
    assert main(["control", "--ranks", "4", "--per-host", "4"]) != 0


@pytest.mark.slow
def test_idle(tmp_path: Path) -> None:
    rows = bench(tmp_path, "idle", "--seconds", "0.2")["rows"]
    assert [row["name"] for row in rows] == ["rank 0", "rank 1", "launcher"]


@pytest.mark.slow
def test_memory(tmp_path: Path) -> None:
    [row] = bench(tmp_path, "memory", "--tiny", "--models", "mlp")["rows"]
    assert row["gradient_bytes"] > 0
    assert set(row["held_bytes"]) == {"no communication", "horovod", "ddp"}


def test_a_saved_result_is_shown_as_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "hvd.init()", "median_s": 0.02, "p10_s": 0.01, "p90_s": 0.03, "calls": 5}]
    saved = tmp_path / "startup.json"
    saved.write_text(json.dumps(result("startup", ["startup"], 2, {"cores": 2, "cpu": "Test CPU"}, rows)["result"]))
    assert main(["show", str(saved), "--markdown"]) == 0
    assert [cell.strip() for cell in capsys.readouterr().out.splitlines()[2].strip("|").split("|")] == [
        "hvd.init()",
        "20.0 ms",
        "10.0 ms",
        "30.0 ms",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["allreduce", "--sizes", "many"], "not a size"),
        (["allreduce", "--dtype", "complex64"], "complex64"),
        (["allreduce", "--against", "nccl"], "gloo, mpich, openmpi"),
        (["train", "--models", "mlp=x"], "mlp=x"),
        (["idle", "--np", "0"], "below 1"),
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


def test_flags_alone_are_for_the_usual_benchmark() -> None:
    for args in (parse([]), parse(["-np", "3"])):
        assert (args.command, args.arena, args.against) == ("allreduce", True, ("gloo", "mpich", "openmpi"))
    assert parse(["-np", "3"]).np == 3


@pytest.mark.parametrize("content", [None, "no JSON"])
def test_a_file_that_is_no_result(content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    if content is not None:
        file.write_text(content)
    assert main(["show", str(file)]) == 2
    assert f"{file} is no result that --json wrote: " in capsys.readouterr().err


def test_without_torch_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["allreduce"]) == 2
    assert "needs torch: pip install torch" in capsys.readouterr().err
