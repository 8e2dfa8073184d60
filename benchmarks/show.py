"""Print results that ``python -m horovod.bench --json FILE`` wrote, as tables for a page of Markdown.

python benchmarks/show.py FILE...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich import box
from rich.console import Console

from horovod.bench.report import Result, table

__all__ = ["markdown"]


def markdown(result: Result) -> str:
    """Return the table of ``result`` as Markdown, without its title."""
    made = table(result)
    made.title, made.box = None, box.MARKDOWN
    for column in made.columns:
        column.no_wrap = True
    console = Console(width=400, color_system=None)
    with console.capture() as capture:
        console.print(made)
    lines = [line.strip() for line in capture.get().splitlines()]
    rule = next(line for line in lines if line.startswith("|-"))
    first = lines.index(rule)
    return "\n".join(line for i, line in enumerate(lines) if line and (line != rule or i == first)) + "\n"


if __name__ == "__main__":
    for file in sys.argv[1:]:
        sys.stdout.write(markdown(json.loads(Path(file).read_text(encoding="utf-8"))))
