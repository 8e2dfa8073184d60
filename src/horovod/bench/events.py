"""What rank 0 says while a benchmark runs, and how it gets out of the job: as marked lines of its output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any

__all__ = ["MARK", "LineReporter", "Reporter", "Tell", "parse_event", "progress", "result"]

MARK = "\x1e"
"""ASCII record separator (RFC 7464): no other output of a job holds it."""

Reporter = Callable[[dict[str, Any]], None]
"""Takes ``{"event": "progress", "done", "total", "text"}`` and ``{"event": "result", "result"}``."""

Tell = Callable[[int, int, str], None]
"""Progress as the benchmarks say it: steps done, steps in all, what is going on."""


def progress(report: Reporter) -> Tell:
    """A ``Tell`` that reports to ``report``."""

    def tell(done: int, total: int, text: str) -> None:
        report({"event": "progress", "done": done, "total": total, "text": text})

    return tell


def result(
    kind: str, typed: Sequence[str], ranks: int, host: dict[str, object], rows: list[dict[str, Any]], **more: object
) -> dict[str, Any]:
    """The event that ends a benchmark; its ``result`` is what goes into the JSON file.

    Args:
        kind: the subcommand.
        typed: its arguments.
        ranks: number of ranks.
        host: facts of the machine, taken before the measurement.
        rows: the figures.
        more: what else belongs to this kind.
    """
    command = " ".join(["python", "-m", "horovod.bench", *(word for word in typed if word != "--events")])
    body = {"schema": 1, "kind": kind, "command": command, "np": ranks, "host": host, **more, "rows": rows}
    return {"event": "result", "result": body}


class LineReporter:
    """Writes events as marked lines, which pass any launcher that forwards output line by line."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stdout

    def __call__(self, event: dict[str, Any]) -> None:
        """Write one event."""
        self._stream.write(f"{MARK}{json.dumps(event)}\n")
        self._stream.flush()


def parse_event(line: str) -> dict[str, Any] | None:
    """The event on ``line``, whatever prefix a launcher put before it; ``None`` when it holds none."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    event: dict[str, Any] = json.loads(text)
    return event
