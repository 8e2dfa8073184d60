"""A result as a table for a person, and as a picture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from horovod.bench import plot
from horovod.bench.cases import LIMIT, OPS, PARTS, format_bytes, format_seconds
from horovod.bench.siblings import describe

__all__ = ["markdown", "notes", "picture", "table"]

Result = dict[str, Any]

_QUIET_CORES = 0.1


def table(result: Result) -> Table:
    """The table of ``result``, whatever kind it is of."""
    kind, ranks, host = result["kind"], result["np"], result["host"]
    title = f"{kind}{_of(result)}, {ranks} ranks on {host['cores']} cores ({host['cpu']})"
    if kind in OPS:
        return _collectives(result, title)
    tables = {
        "train": _train,
        "optimizer": _optimizer,
        "timeline": _observed,
        "profile": _profile,
        "memory": _memory,
        "idle": _idle,
        "startup": _startup,
        "control": _control,
    }
    return tables[kind](result, title)


def _of(result: Result) -> str:
    """Whose tensors were measured, where that was said."""
    backend = result.get("backend")
    return f" of {result['framework']}" + (f" on {backend}" if backend else "") if "framework" in result else ""


def markdown(result: Result) -> str:
    """The table of ``result`` as Markdown, without its title."""
    made = table(result)
    made.title, made.box = None, box.MARKDOWN
    console = Console(width=300, color_system=None)
    with console.capture() as capture:
        console.print(made)
    return "\n".join(line.strip() for line in capture.get().splitlines() if line.strip()) + "\n"


def _new(title: str, first: str, columns: Iterable[str]) -> Table:
    made = Table(title=title)
    made.add_column(first)
    for column in columns:
        made.add_column(column, justify="right")
    return made


def _names(result: Result) -> tuple[list[str], list[str]]:
    """Our columns and the peers' columns that hold at least one figure."""
    seen = [name for row in result["rows"] for name in row["results"] if name != LIMIT]
    ordered = list(dict.fromkeys(seen))
    return [n for n in ordered if n.startswith("horovod")], [n for n in ordered if not n.startswith("horovod")]


def _collectives(result: Result, title: str) -> Table:
    """One line per size. Where two of our columns share a cell, the arena's figure stands second."""
    ours, peers = _names(result)
    columns = list(ours)
    for peer in peers:
        columns += [peer, "slower by"]
    made = _new(title, "size", [*columns, "bus GB/s", "of memory limit"])
    several = len({row["dtype"] for row in result["rows"]}) > 1
    for row in result["rows"]:
        label = format_bytes(row["nbytes"]) + (f" x {row['batch']}" if row["batch"] > 1 else "")
        cells = [f"{label} {row['dtype']}" if several else label, *(_time(row, us) for us in ours)]
        for peer in peers:
            cells += [_time(row, peer), _each(_ratio(row["ratios"].get(us, {}).get(peer)) for us in ours)]
        cells.append(_each(f"{row['bus_bytes_s'][us] / 1e9:.3g}" for us in ours if us in row["bus_bytes_s"]))
        shares = [f"{row['limit_share'][us]:.0%}" for us in ours if us in row["limit_share"]]
        made.add_row(*cells, _each(shares) or "-")
    return made


def _each(figures: Iterable[str]) -> str:
    return " | ".join(figures)


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
            made.add_row(
                "" if number else row["model"],
                "" if number else f"{row['parameters']:,}",
                name,
                format_seconds(one["median_s"]),
                format_seconds(one["exposed_s"]),
                f"{one['efficiency']:.1%}",
                end_section=number == len(row["results"]) - 1,
            )
    return made


def _optimizer(result: Result, title: str) -> Table:
    made = _new(title, "model", ["parameters", "way", "step", "fastest tenth", "state per rank"])
    for row in result["rows"]:
        for number, (name, one) in enumerate(row["results"].items()):
            made.add_row(
                "" if number else row["model"],
                "" if number else f"{row['parameters']:,}",
                name,
                format_seconds(one["median_s"]),
                format_seconds(one["p10_s"]),
                format_bytes(one["state_bytes"]),
                end_section=number == len(row["results"]) - 1,
            )
    return made


def _observed(result: Result, title: str) -> Table:
    made = _new(title, "model", ["operations", "way", "step", "fastest", "CPU of its thread", "adds", "of a step"])
    for row in result["rows"]:
        for number, (name, one) in enumerate(row["results"].items()):
            made.add_row(
                "" if number else row["model"],
                "" if number else str(row["operations"]),
                name,
                *(format_seconds(one[key]) if key in one else "-" for key in ("median_s", "fastest_s", "busy_s")),
                *((format_seconds(one["beyond_s"]), f"{one['share']:.2%}") if number else ("-", "-")),
                end_section=number == len(row["results"]) - 1,
            )
    return made


def _profile(result: Result, title: str) -> Table:
    made = _new(title, "size", ["way", "call", *PARTS, "copy alone", "add alone"])
    for row in result["rows"]:
        alone = [format_seconds(row[key]) for key in ("copy_s", "add_s")]
        for number, (name, one) in enumerate(row["results"].items()):
            parts = (format_seconds(one[f"{key}_s"]) for key in ("median", *PARTS))
            size = "" if number else format_bytes(row["nbytes"])
            made.add_row(size, name, *parts, *(("", "") if number else alone))
    return made


def _memory(result: Result, title: str) -> Table:
    made = _new(title, "model", ["gradients", "way", "held per rank", "beyond", "of the gradients"])
    for row in result["rows"]:
        for number, (name, held) in enumerate(row["held_bytes"].items()):
            beyond = row["beyond_bytes"][name]
            made.add_row(
                "" if number else row["model"],
                "" if number else format_bytes(row["gradient_bytes"]),
                name,
                format_bytes(held),
                format_bytes(beyond),
                f"{beyond / row['gradient_bytes']:.1%}",
                end_section=number == len(row["held_bytes"]) - 1,
            )
    return made


def _idle(result: Result, title: str) -> Table:
    made = _new(title, "process", ["CPU", "of a core", "wake-ups/s"])
    for row in result["rows"]:
        woken = "-" if row["wakeups_s"] is None else f"{row['wakeups_s']:.1f}"
        made.add_row(row["name"], format_seconds(row["cpu_s"]), f"{row['core_share']:.3%}", woken)
    return made


def _startup(result: Result, title: str) -> Table:
    made = _new(title, "what", ["median", "fastest tenth", "slowest tenth"])
    for row in result["rows"]:
        made.add_row(row["name"], *(format_seconds(row[key]) for key in ("median_s", "p10_s", "p90_s")))
    return made


def _control(result: Result, title: str) -> Table:
    made = _new(title, "of a step", ["median", "fastest tenth", "bytes"])
    for row in result["rows"]:
        made.add_row(row["name"], *(format_seconds(row[key]) for key in ("median_s", "p10_s")), row["bytes"])
    return made


def notes(result: Result) -> list[str]:
    """What the table alone does not say: the memory limit, and who was left out and why."""
    said = []
    limits = [
        (row["nbytes"] * row["batch"], row["limit_bytes_s"]) for row in result["rows"] if row.get("limit_bytes_s")
    ]
    if limits:
        nbytes, limit = max(limits)
        said.append(
            f"memory limit: all ranks read and write in place what the operation must at least read and write "
            f"({limit / 1e9:.1f} GB/s at {format_bytes(nbytes)}; small sizes stay in caches)"
        )
    if "cores" in result:
        said += describe(result["cores"])
    others = result.get("others_cores", {})
    if sum(others.values()) > _QUIET_CORES:
        said.append(
            f"not a quiet machine: other programs used {others['programs']:.2f} cores meanwhile, "
            f"and {others['stolen']:.2f} were given to other virtual machines"
        )
    for row in result["rows"]:
        for name, reason in row.get("skipped", {}).items():
            said.append(f"{name}, {format_bytes(row['nbytes'])} {row['dtype']}: {reason}")
    return _joined(said)


def _joined(said: list[str]) -> list[str]:
    """Say the same reason once, not once for every size."""
    by_reason: dict[str, list[str]] = {}
    for line in said:
        what, _, reason = line.partition(": ")
        by_reason.setdefault(reason, []).append(what)
    lines = []
    for reason, whats in by_reason.items():
        who = whats[0] if len(whats) == 1 else f"{whats[0]} … {whats[-1].rpartition(', ')[2]}"
        lines.append(f"{who}: {reason}")
    return lines


def picture(result: Result) -> str:
    """``result`` as SVG."""
    kind = result["kind"]
    title = f"{kind}{_of(result)}, {result['np']} ranks on {result['host']['cores']} cores"
    if kind in OPS:
        return _curves(result, title)
    items: list[tuple[str, float, str]] = []
    for row in result["rows"]:
        if kind in ("train", "optimizer", "profile"):
            what = format_bytes(row["nbytes"]) if kind == "profile" else row["model"]
            for name, one in row["results"].items():
                items.append((f"{what}, {name}", one["median_s"], format_seconds(one["median_s"])))
        elif kind == "timeline":
            for name, one in row["results"].items():
                items.append((f"{row['model']}, {name}", max(one["share"], 0.0), f"{one['share']:.2%}"))
        elif kind == "memory":
            for name, beyond in row["beyond_bytes"].items():
                items.append((f"{row['model']}, {name}", beyond, format_bytes(beyond)))
        elif kind == "idle":
            items.append((row["name"], row["core_share"], f"{row['core_share']:.3%} of a core"))
        else:
            items.append((row["name"], row["median_s"], format_seconds(row["median_s"])))
    return plot.bars(title, items)


def _curves(result: Result, title: str) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    several = len({row["dtype"] for row in result["rows"]}) > 1
    for row in result["rows"]:
        for name, one in row["results"].items():
            label = f"{name} {row['dtype']}" if several else name
            series.setdefault(label, []).append((row["nbytes"], one["median_s"]))
    sizes = {float(row["nbytes"]): format_bytes(row["nbytes"]) for row in result["rows"]}
    times = {10.0**power: format_seconds(10.0**power) for power in range(-7, 3)}
    return plot.lines(f"{title}: time of one call", series, sizes, times)
