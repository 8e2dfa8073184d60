"""A result as a table for people, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from horovod.bench.cases import OPS, PARTS, format_seconds
from horovod.phrases import format_bytes

__all__ = ["notes", "show", "table"]

Result = dict[str, Any]

_WHY_NO_SUM = {
    "train": "step: the median of all steps. exposed communication: the median over rounds of the difference to no "
    "communication in the same round. Medians do not add up, so step is not the sum",
    "profile": "each column is a median of its own, so the parts do not add up to the call exactly",
}


def show(result: Result, file: Path | None) -> None:
    """Print a result."""
    stdout = Console()
    if not stdout.is_terminal:
        stdout = Console(width=160)
    stdout.print(table(result))
    for line in notes(result):
        stdout.print(line, markup=False, highlight=False)
    if file:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def table(result: Result) -> Table:
    """Return the table of ``result``, of any kind."""
    kind, ranks, host = result["kind"], result["np"], result["host"]
    backend = f" on {result['backend']}" if "backend" in result else ""
    framework = f" of {result['framework']}{backend}" if "framework" in result else ""
    title = f"{kind}{framework}, {ranks} ranks on {host['cores']} cores ({host['cpu']})"
    if kind in OPS:
        return _collectives(result, title)
    return {"train": _train, "profile": _profile, "network": _network}[kind](result, title)


def _new(title: str, first: str, columns: Iterable[str]) -> Table:
    made = Table(title=title)
    made.add_column(first)
    for column in columns:
        made.add_column(column, justify="right")
    return made


def _collectives(result: Result, title: str) -> Table:
    """Make one line per size: our times, then each peer's time, and its ratio to our best time."""
    names = list(dict.fromkeys(name for row in result["rows"] for name in row["results"]))
    ours = [name for name in names if name.startswith("horovod")]
    peers = [name for name in names if name not in ours]
    columns = [*ours, *(column for peer in peers for column in (peer, *(f"{peer} / {us}" for us in ours)))]
    made = _new(title, "size", columns)
    several = len({row["dtype"] for row in result["rows"]}) > 1
    for row in result["rows"]:
        label = format_bytes(row["nbytes"]) + (f" x {row['batch']}" if row["batch"] > 1 else "")
        cells = [f"{label} {row['dtype']}" if several else label, *(_time(row, us) for us in ours)]
        for peer in peers:
            cells += [_time(row, peer), *(_ratio(row["ratios"].get(us, {}).get(peer)) for us in ours)]
        made.add_row(*cells)
    return made


def _time(row: dict[str, Any], name: str) -> str:
    return format_seconds(row["results"][name]["median_s"]) if name in row["results"] else "-"


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"


def _train(result: Result, title: str) -> Table:
    made = _new(title, "model", ["parameters", "way", "step", "exposed communication", "efficiency"])
    for row in result["rows"]:
        for number, (name, one) in enumerate(row["results"].items()):
            first = ("", "") if number else (row["model"], f"{row['parameters']:,}")
            times = (format_seconds(one["median_s"]), format_seconds(one["exposed_s"]))
            made.add_row(
                *first, name, *times, f"{one['efficiency']:.1%}", end_section=number == len(row["results"]) - 1
            )
    return made


def _profile(result: Result, title: str) -> Table:
    made = _new(title, "size", ["way", "call", *PARTS])
    for row in result["rows"]:
        for number, (name, one) in enumerate(row["results"].items()):
            parts = (format_seconds(one[f"{key}_s"]) for key in ("median", *PARTS))
            size = "" if number else format_bytes(row["nbytes"])
            made.add_row(size, name, *parts)
    return made


def _network(result: Result, title: str) -> Table:
    made = _new(title, "hosts", ["allreduce of 64 B", "bandwidth"])
    for row in result["rows"]:
        made.add_row(row["hosts"], format_seconds(row["latency_s"]), f"{row['bytes_s'] * 8 / 1e9:.3g} Gbit/s")
    return made


def notes(result: Result) -> list[str]:
    """Return notes for the table: why columns do not add up, contenders left out."""
    said = [_WHY_NO_SUM[result["kind"]]] if result["kind"] in _WHY_NO_SUM else []
    left_out: dict[str, list[str]] = {}
    for row in result["rows"]:
        for name, reason in row.get("skipped", {}).items():
            left_out.setdefault(f"{name} was not measured: {reason}", []).append(format_bytes(row["nbytes"]))
    return [*said, *(f"{reason} ({sizes[0]} … {sizes[-1]})" for reason, sizes in left_out.items())]
