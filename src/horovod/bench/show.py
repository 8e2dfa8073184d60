"""Show a benchmark's result as a table and a JSON file."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from horovod.bench.report import markdown, notes, table

__all__ = ["show", "show_files"]


def show(result: dict[str, Any], file: Path | None) -> None:
    """Print a result.

    Args:
        result: of ``run_rank``.
        file: where to write it as well.
    """
    _print(result)
    if file:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


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
