"""Progress and results of a benchmark, sent from rank 0 to the process that started it as marked lines of output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["MARK", "Reporter", "Tell", "parse_event", "progress", "result", "write_event"]

MARK = "\x1e"
"""ASCII record separator (RFC 7464): no other output of a job holds it."""

Reporter = Callable[[dict[str, Any]], None]
"""Takes ``{"event": "progress", "done", "total", "text"}`` and ``{"event": "result", "result"}``."""

Tell = Callable[[int, int, str], None]
"""Progress: steps done, steps in all, what is running."""


def progress(report: Reporter) -> Tell:
    """Return a ``Tell`` that reports to ``report``."""

    def tell(done: int, total: int, text: str) -> None:
        report({"event": "progress", "done": done, "total": total, "text": text})

    return tell


def result(
    kind: str, typed: Sequence[str], ranks: int, host: dict[str, object], rows: list[dict[str, Any]], **more: object
) -> dict[str, Any]:
    """Return the event that ends a benchmark; its ``result`` goes into the JSON file.

    Args:
        kind: the subcommand.
        typed: its arguments.
        ranks: number of ranks.
        host: facts of the machine, taken before the measurement.
        rows: the figures.
        more: further fields of this kind.
    """
    command = " ".join(["python", "-m", "horovod.bench", *(word for word in typed if word != "--events")])
    body = {"schema": 1, "kind": kind, "command": command, "np": ranks, "host": host, **more, "rows": rows}
    return {"event": "result", "result": body}


def write_event(event: dict[str, Any]) -> None:
    """Write an event as a marked line, which passes any launcher that forwards output line by line."""
    sys.stdout.write(f"{MARK}{json.dumps(event)}\n")
    sys.stdout.flush()


def parse_event(line: str) -> dict[str, Any] | None:
    """Return the event on ``line``, behind any prefix of a launcher; ``None`` when there is none."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    event: dict[str, Any] = json.loads(text)
    return event
