"""Log lines of ``poprun`` itself, on standard error, with time, process and level."""

from __future__ import annotations

import logging
import sys

__all__ = ["new_log"]


class _EachLine(logging.Formatter):
    """Formats each line of a message as ``12:34:56.789 4711 POPRUN [I] text``."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{self.formatTime(record, '%H:%M:%S')}.{int(record.msecs):03} {record.process} POPRUN"
        return "\n".join(f"{head} [{record.levelname[0]}] {line}" for line in record.getMessage().split("\n"))


def new_log(verbosity: int) -> logging.Logger:
    """Return a log to standard error.

    Args:
        verbosity: 0 for warnings and errors, 1 for information, 2 for details.
    """
    log = logging.Logger("poprun", (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbosity, 2)])
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_EachLine())
    log.addHandler(handler)
    return log
