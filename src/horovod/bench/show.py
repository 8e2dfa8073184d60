"""Events become a progress bar, then a table, a JSON file and a picture."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from horovod.bench.events import Reporter
from horovod.bench.report import markdown, notes, picture, table

__all__ = ["show", "show_files"]


def show(args: argparse.Namespace, run: Callable[[Reporter], int]) -> int:
    """Run a benchmark with a progress bar on stderr, and show what it found on stdout.

    Args:
        args: of which ``json`` and ``plot`` name files to write.
        run: carries the benchmark out and reports; returns its exit status.

    Returns:
        The exit status: that of ``run``, or 1 when it ended without a result.
    """
    found: list[dict[str, Any]] = []
    stderr = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal, transient=True) as bar:
        task = bar.add_task(args.command, total=None)

        def report(event: dict[str, Any]) -> None:
            if event["event"] == "progress":
                bar.update(task, completed=event["done"], total=event["total"], description=event["text"])
            else:
                found.append(event["result"])

        status = run(report)
    if status or not found:
        stderr.print(f"horovod.bench {args.command}: no result, exit status {status}", markup=False, highlight=False)
        return status or 1
    _deliver(args, found[-1])
    return 0


def show_files(files: Sequence[Path], *, as_markdown: bool = False) -> int:
    """Print results that were written to ``files``.

    Returns:
        The exit status: 2 when one of them cannot be read.
    """
    for file in files:
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            print(f"horovod.bench show: {file} is no result that --json wrote: {error}", file=sys.stderr)
            return 2
        if as_markdown:
            sys.stdout.write(markdown(result))
        else:
            _print(result)
    return 0


def _print(result: dict[str, Any]) -> None:
    stdout = Console()
    if not stdout.is_terminal:
        stdout = Console(width=160)
    stdout.print(table(result))
    for line in notes(result):
        stdout.print(line, markup=False, highlight=False)


def _deliver(args: argparse.Namespace, result: dict[str, Any]) -> None:
    _print(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        args.plot.write_text(picture(result), encoding="utf-8")
