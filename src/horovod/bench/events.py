"""Results of a benchmark, sent from rank 0 to the process that started it as marked lines of output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["Tell", "parse_event", "write_event"]

#: ASCII record separator (RFC 7464): no other output of a job holds it.
_MARK = "\x1e"

Tell = Callable[[int, int, str], None]
"""Progress: steps done, steps in all, what is running."""


def write_event(event: dict[str, Any]) -> None:
    """Write an event as a marked line, which passes any launcher that forwards output line by line."""
    sys.stdout.write(f"{_MARK}{json.dumps(event)}\n")
    sys.stdout.flush()


def parse_event(line: str) -> dict[str, Any] | None:
    """Return the event on ``line``, behind any prefix of a launcher; ``None`` when there is none."""
    _, mark, text = line.partition(_MARK)
    if not mark:
        return None
    event: dict[str, Any] = json.loads(text)
    return event
