"""Tables and pictures of every kind of result."""

from __future__ import annotations

import io
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from horovod.bench import plot
from horovod.bench.events import result
from horovod.bench.report import notes, picture, table

HOST: dict[str, object] = {"cores": 2, "cpu": "Test CPU"}
TIME = {"median_s": 1e-3, "p10_s": 9e-4, "p90_s": 2e-3, "calls": 10}
COLLECTIVE = {
    "op": "allreduce",
    "nbytes": 1 << 20,
    "dtype": "float32",
    "batch": 1,
    "results": {"horovod": TIME, "gloo": {**TIME, "median_s": 5e-3}},
    "ratios": {"horovod": {"gloo": 5.0}},
    "bus_bytes_s": {"horovod": 1e9},
    "limit_bytes_s": 40e9,
    "limit_share": {"horovod": 0.5},
    "skipped": {"mpich": "not installed"},
}
STEP = {**TIME, "exposed_s": 1e-4, "efficiency": 0.91}
ROWS: dict[str, dict[str, Any]] = {
    "allreduce": COLLECTIVE,
    "async": {**COLLECTIVE, "op": "async", "batch": 50},
    "train": {"model": "mlp", "parameters": 1000, "results": {"no communication": STEP, "horovod": STEP}},
    "optimizer": {"model": "mlp", "parameters": 1000, "results": {"horovod": {**STEP, "state_bytes": 2048}}},
    "timeline": {
        "model": "mlp",
        "operations": 7,
        "results": {
            "no timeline": {**TIME, "fastest_s": 9e-4, "beyond_s": 0.0, "share": 0.0},
            "timeline": {**TIME, "fastest_s": 9e-4, "busy_s": 3e-6, "beyond_s": 5e-6, "share": 0.005},
            "flight recorder": {"beyond_s": 2e-6, "share": 0.002},
        },
    },
    "memory": {"model": "mlp", "gradient_bytes": 4000, "held_bytes": {"ddp": 5000}, "beyond_bytes": {"ddp": 1000}},
    "idle": {"name": "rank 0", "cpu_s": 0.001, "core_share": 0.0001, "wakeups_s": 10.0},
    "startup": {"name": "hvd.init()", **TIME},
    "control": {"name": "hub", "bytes": "2033 in", **TIME},
}
EXPECTED = {
    "allreduce": ["1 MiB", "1.00 ms", "5.00x", "50%"],
    "async": ["1 MiB x 50"],
    "train": ["mlp", "1,000", "91.0%", "100 µs"],
    "optimizer": ["mlp", "1,000", "2 KiB"],
    "timeline": ["flight recorder", "3.00 µs", "5.00 µs", "0.50%"],
    "memory": ["1000 B", "25.0%"],
    "idle": ["rank 0", "0.010%"],
    "startup": ["hvd.init()", "900 µs"],
    "control": ["hub", "2033 in", "900 µs"],
}


def made(kind: str) -> dict[str, Any]:
    body: dict[str, Any] = result(kind, [kind], 2, HOST, [ROWS[kind]])["result"]
    return body


@pytest.mark.parametrize("kind", ROWS)
def test_the_table_holds_the_figures(kind: str) -> None:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as capture:
        console.print(table(made(kind)))
    text = capture.get()
    assert "Test CPU" in text
    for expected in EXPECTED[kind]:
        assert expected in text


@pytest.mark.parametrize("kind", ROWS)
def test_the_picture_is_well_formed(kind: str) -> None:
    assert ElementTree.fromstring(picture(made(kind))).tag.endswith("svg")


def test_notes_name_the_limit_and_who_was_left_out() -> None:
    lines = notes(made("allreduce"))
    assert any("40.0 GB/s at 1 MiB" in line for line in lines)
    assert any("mpich" in line and "not installed" in line for line in lines)


def test_a_machine_that_was_not_quiet_is_said_to_be_so() -> None:
    noisy = {**made("allreduce"), "others_cores": {"programs": 0.7, "stolen": 0.1}}
    assert any("0.70 cores" in line for line in notes(noisy))
    quiet = {**noisy, "others_cores": {"programs": 0.01, "stolen": 0.0}}
    assert not any("quiet" in line for line in notes(quiet))


def test_the_same_reason_is_said_once() -> None:
    body = made("allreduce")
    body["rows"] = [{**COLLECTIVE, "nbytes": size} for size in (64, 1024, 4096)]
    assert len([line for line in notes(body) if "not installed" in line]) == 1


def test_an_empty_plot_says_so() -> None:
    assert "nothing was measured" in plot.lines("title", {}, {}, {})


def test_labels_are_escaped() -> None:
    assert "&lt;b&gt;" in plot.bars("<b>", [("x", 1.0, "1")])
