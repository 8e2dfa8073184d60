"""Output of the logger ``horovod`` if the script has not set up its own logging."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import ClassVar

from horovod.config import Config

__all__ = ["configure", "logger"]

logger = logging.getLogger("horovod")

_TRACE = 5
_LEVELS = {
    "trace": _TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}


class _Formatter(logging.Formatter):
    """Puts the rank in front of every line, also in a message of several lines."""

    def __init__(self, rank: int, with_time: bool) -> None:
        super().__init__()
        self._rank = rank
        self._with_time = with_time

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a message."""
        who = f"horovod[{self._rank}]"
        first, *more = super().format(record).split("\n")
        stamp = f"{self.formatTime(record)} " if self._with_time else ""
        return "\n".join([f"{stamp}{who} {record.levelname}: {first}", *(f"{who}   {line}" for line in more)])


class _Handler(logging.Handler):
    """Prints on standard error unless another handler handles the record."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message."""
        if _is_taken_care_of():
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


class _Ours:
    """Our own settings, so that the next ``configure`` can tell them from the user's."""

    handler: _Handler | None = None
    level = logging.NOTSET
    complaints: ClassVar[set[str]] = set()


def _is_taken_care_of() -> bool:
    """Whether the script, or one of its libraries, has set up logging."""
    return bool(logging.getLogger().handlers) or any(handler is not _Ours.handler for handler in logger.handlers)


def configure(config: Config, rank: int, complaints: Sequence[str] = ()) -> None:
    """Configure the logger from the settings, unless the script has configured it, or the root logger.

    A level other than the default applies even then, because the user has requested it.

    Args:
        config: the settings.
        rank: rank to show in every line.
        complaints: warnings to log now, on rank 0 alone and once in a process.
    """
    logging.addLevelName(_TRACE, "TRACE")
    asked_for = config.log_level != Config.log_level
    if logger.level in (logging.NOTSET, _Ours.level) and (asked_for or not _is_taken_care_of()):
        _Ours.level = _LEVELS[config.log_level]
        logger.setLevel(_Ours.level)
    if _Ours.handler is None:
        _Ours.handler = _Handler()
        logger.addHandler(_Ours.handler)
    _Ours.handler.setFormatter(_Formatter(rank, with_time=not config.log_hide_time))
    for complaint in complaints if rank == 0 else ():
        if complaint not in _Ours.complaints:
            _Ours.complaints.add(complaint)
            logger.warning(complaint)
