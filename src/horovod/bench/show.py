"""Show a benchmark's progress, and its result as a table and a JSON file."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from horovod.bench.events import Reporter
from horovod.bench.report import markdown, notes, table

__all__ = ["show", "show_files"]

#: Between two lines of progress.
_LINE_S = 5.0


def show(args: argparse.Namespace, run: Callable[[Reporter], int]) -> int:
    """Run a benchmark, show its progress on stderr and its result on stdout.

    Args:
        args: the command line; ``json`` names a file to write.
        run: carries the benchmark out and reports; returns its exit status.

    Returns:
        The exit status: that of ``run``, or 1 when it ended without a result.
    """
    found: list[dict[str, Any]] = []
    start = said = time.monotonic()

    def report(event: dict[str, Any]) -> None:
        nonlocal said
        if event["event"] == "result":
            found.append(event["result"])
            return
        now = time.monotonic()
        if now - said > _LINE_S:
            said, done = now, f"{event['done']} of {event['total']}: {event['text']}"
            print(f"horovod.bench {args.command}: {now - start:.0f} s, {done}", file=sys.stderr, flush=True)

    status = run(report)
    if status or not found:
        print(f"horovod.bench {args.command}: no result, exit status {status}", file=sys.stderr)
        return status or 1
    _print(found[-1])
    if args.json:
        args.json.write_text(json.dumps(found[-1], indent=1) + "\n", encoding="utf-8")
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
            print(f"horovod.bench show: cannot read {file} as a result of --json: {error}", file=sys.stderr)
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
