"""Tables and pictures of every kind of result."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from benchmarks.show import markdown
from horovod.bench.report import notes, table

HOST: dict[str, object] = {"cores": 2, "cpu": "Test CPU"}
TIME = {"median_s": 1e-3, "p10_s": 9e-4, "p90_s": 2e-3, "calls": 10}
COLLECTIVE = {
    "op": "allreduce",
    "nbytes": 1 << 20,
    "dtype": "float32",
    "batch": 1,
    "results": {"horovod": TIME, "gloo": {**TIME, "median_s": 5e-3}},
    "ratios": {"horovod": {"gloo": 5.0}},
    "skipped": {"mpich": "not installed"},
}
PARTS_OF_A_CALL = {"median_s": 1e-3, **{f"{part}_s": 7e-6 for part in ("agree", "execute", "rest")}}
STEP = {**TIME, "exposed_s": 1e-4, "efficiency": 0.91}
ROWS: dict[str, dict[str, Any]] = {
    "allreduce": COLLECTIVE,
    "async": {**COLLECTIVE, "op": "async", "batch": 50},
    "train": {"model": "mlp", "parameters": 1000, "results": {"no communication": STEP, "horovod": STEP}},
    "profile": {"nbytes": 64, "results": {"horovod": PARTS_OF_A_CALL}},
    "network": {"hosts": "a, b", "latency_s": 1e-4, "bytes_s": 125e6},
}
EXPECTED = {
    "allreduce": ["1 MiB", "1.00 ms", "5.00x"],
    "async": ["1 MiB x 50"],
    "train": ["mlp", "1,000", "91.0%", "100 µs"],
    "profile": ["64 B", "1.00 ms", "7.00 µs"],
    "network": ["a, b", "100 µs", "1 Gbit/s"],
}


def made(kind: str) -> dict[str, Any]:
    return {"kind": kind, "np": 2, "host": HOST, "rows": [ROWS[kind]]}


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
def test_a_table_for_a_page_holds_one_number_in_a_cell(kind: str) -> None:
    header, rule, *rows = markdown(made(kind)).splitlines()
    assert set(rule) == {"|", "-"}
    assert all(row.count("|") == header.count("|") for row in rows)


def test_the_table_of_training_explains_why_columns_do_not_add_up() -> None:
    assert any("Medians do not add up" in line for line in notes(made("train")))


def test_notes_name_who_was_left_out() -> None:
    lines = notes(made("allreduce"))
    assert any("mpich" in line and "not installed" in line for line in lines)


def test_the_same_reason_is_said_once() -> None:
    body = made("allreduce")
    body["rows"] = [{**COLLECTIVE, "nbytes": size} for size in (64, 1024, 4096)]
    assert len([line for line in notes(body) if "not installed" in line]) == 1
