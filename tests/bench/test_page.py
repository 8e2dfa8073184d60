"""The figures on the performance page are those of the committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.plot import picture
from benchmarks.show import markdown

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"
SAVED = sorted((ROOT / "benchmarks").glob("*.json"))
TABLES = dict(re.findall(r"<!-- (benchmarks/[\w.-]+\.json) -->\n\n((?:\|.*\n)+)", PAGE.read_text(encoding="utf-8")))


@pytest.mark.parametrize("place", TABLES)
def test_a_table_holds_the_figures_of_its_file(place: str) -> None:
    assert TABLES[place] == markdown(json.loads((ROOT / place).read_text(encoding="utf-8")))


@pytest.mark.parametrize("saved", SAVED, ids=lambda path: path.name)
def test_a_saved_result_names_its_command_and_its_host(saved: Path) -> None:
    result = json.loads(saved.read_text(encoding="utf-8"))
    assert result["command"].startswith("python -m horovod.bench ")
    assert {"cpu", "cores", "caches", "versions"} <= set(result["host"])
    assert picture(result).startswith("<svg")


def test_the_picture_on_the_page_is_that_of_its_file() -> None:
    result = json.loads((ROOT / "benchmarks" / "allreduce-np2.json").read_text(encoding="utf-8"))
    assert (ROOT / "docs" / "allreduce.svg").read_text(encoding="utf-8") == picture(result)


def test_no_cell_of_a_table_holds_two_numbers() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [cell for row in rows for cell in row.strip("|").split("|")]
    numbers = [re.findall(r"(?<![\w.])\d[\d,.]*", cell.replace(" x ", "x").partition("of ")[0]) for cell in cells]
    assert not [cell for cell, found in zip(cells, numbers, strict=True) if len(found) > 1]


def test_what_several_hosts_cost_names_its_commands_and_their_host() -> None:
    parts = json.loads((ROOT / "benchmarks" / "hosts" / "2x2.json").read_text(encoding="utf-8"))
    assert set(parts) == {"unshaped", "shaped", "train", "launch"}
    for part in parts.values():
        for command in part["commands"]:
            assert command.startswith("python -m horovod.bench ")
            assert part["result"]["command"] == command
            assert {"cpu", "cores", "caches", "versions"} <= set(part["result"]["host"])


def test_every_saved_result_is_on_the_page() -> None:
    assert {f"benchmarks/{path.name}" for path in SAVED} == set(TABLES)
