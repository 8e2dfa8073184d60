"""``python -m horovod.timeline FILE``: what a timeline says, as tables and as a picture."""

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
    """Entry point of the command.

    Args:
        argv: arguments without the program's name; those of this process when omitted.

    Returns:
        0, or 2 when the file is no timeline or the picture cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="python -m horovod.timeline",
        description="Say where the time of a training run goes. The file itself opens in ui.perfetto.dev.",
    )
    parser.add_argument("file", type=Path, help="what HOROVOD_TIMELINE or start_timeline() wrote")
    parser.add_argument("--picture", type=Path, metavar="SVG", help="also draw it")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON instead of tables")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="show the N slowest steps (default 10)")
    parser.add_argument("--tensors", type=int, default=12, metavar="N", help="show N tensors (default 12)")
    options = parser.parse_args(argv)
    show_any_text(sys.stdout)
    picture: Path | None = options.picture
    if picture is not None and picture.suffix.lower() != ".svg":
        return _fail(f"a picture is drawn as SVG, not as {picture.suffix or 'a file without a suffix'}: "
                     f"--picture {picture.with_suffix('.svg')}")  # fmt: skip
    try:
        ranks = read(options.file)
    except (OSError, ValueError) as error:
        return _fail(str(error))
    summary = summarise(ranks)
    if picture is not None:
        from horovod.timeline.picture import draw

        try:
            picture.write_text(draw(summary, ranks), encoding="utf-8")
        except OSError as error:
            return _fail(f"the picture {picture} cannot be written: {error.strerror}")
    try:
        _print(summary, options)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich makes the one into the other
        discard_output()  # who reads has seen enough, as `head` does
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
