"""``python -m horovod.timeline FILE``: summarises a timeline in tables."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from horovod.phrases import discard_output, show_any_text
from horovod.timeline.read import read
from horovod.timeline.summary import Summary, summarise


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns 0, or 2 when the file is not a timeline or the output cannot be written."""
    parser = argparse.ArgumentParser(
        prog="python -m horovod.timeline",
        description="Show where the time of a training run goes. The file itself opens in ui.perfetto.dev.",
    )
    parser.add_argument("file", type=Path, help="the file that HOROVOD_TIMELINE or start_timeline() named")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON instead of tables")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="show the N slowest steps (default 10)")
    parser.add_argument("--tensors", type=int, default=12, metavar="N", help="show N tensors (default 12)")
    options = parser.parse_args(argv)
    show_any_text(sys.stdout)
    try:
        ranks = read(options.file)
    except (OSError, ValueError) as error:
        return _fail(str(error))
    summary = summarise(ranks)
    try:
        _print(summary, options)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich turns the first into the second
        discard_output()  # the reader has closed the pipe, as `head` does
    except OSError as error:
        discard_output()
        return _fail(f"the output cannot be written: {error.strerror}")
    return 0


def _fail(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    return 2


def _print(summary: Summary, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(asdict(summary), indent=1))
    else:
        from rich.console import Console

        from horovod.timeline.show import show

        # A pipe has no width: nothing is cut there.
        console = Console(width=None if sys.stdout.isatty() else 160)
        show(summary, console, options.steps, options.tensors)


if __name__ == "__main__":
    sys.exit(main())
