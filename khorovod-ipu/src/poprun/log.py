"""Log lines of ``poprun`` itself, on standard error, with time, process and level."""

from __future__ import annotations

import os
import sys
import time

__all__ = ["Log", "log_line"]


def log_line(level: str, text: str, now_s: float, pid: int) -> str:
    """Return one line, such as ``12:34:56.789 4711 POPRUN [I] text``.

    Args:
        level: D, I, W or E.
        text: the message.
        now_s: seconds since 1970.
        pid: id of the logging process.
    """
    fraction = int(now_s % 1 * 1000)
    return f"{time.strftime('%H:%M:%S', time.localtime(now_s))}.{fraction:03} {pid} POPRUN [{level}] {text}"


class Log:
    """Logs to standard error.

    Args:
        verbosity: 0 for warnings and errors, 1 for information, 2 for details.
    """

    def __init__(self, verbosity: int) -> None:
        self._verbosity = verbosity

    def debug(self, text: str) -> None:
        """Log a detail."""
        if self._verbosity > 1:
            self._say("D", text)

    def info(self, text: str) -> None:
        """Log information."""
        if self._verbosity:
            self._say("I", text)

    def warning(self, text: str) -> None:
        """Log a warning."""
        self._say("W", text)

    def error(self, text: str) -> None:
        """Log an error."""
        self._say("E", text)

    def _say(self, level: str, text: str) -> None:
        for line in text.split("\n"):
            try:
                print(log_line(level, line, time.time(), os.getpid()), file=sys.stderr, flush=True)
            except OSError:
                return  # standard error is closed; the exit code remains
