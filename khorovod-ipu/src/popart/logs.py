"""``popart.getLogger``: Python's logging with PopART's names of modules and levels."""

from __future__ import annotations

import logging
from typing import Any

from popart.errors import popart_exception

__all__ = ["Logger", "getLogger"]

_TRACE = 5
_LEVELS = {
    "TRACE": _TRACE, "DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARN": logging.WARNING, "ERR": logging.ERROR,
    "CRITICAL": logging.CRITICAL, "OFF": logging.CRITICAL + 10,
}  # fmt: skip


class Logger(logging.LoggerAdapter[logging.Logger]):
    """The log of one module of PopART, on standard error.

    Args:
        module: its name, such as ``ir`` or ``session``.
    """

    def __init__(self, module: str) -> None:
        super().__init__(logging.getLogger(f"popart.{module}" if module else "popart"), {})

    def setLevel(self, level: int | str) -> None:
        """Set the lowest level to show: TRACE, DEBUG, INFO, WARN, ERR, CRITICAL or OFF.

        Raises:
            popart_exception: the level does not exist.
        """
        name = str(level).upper()
        if name not in _LEVELS:
            raise popart_exception(f"the logging level {level!r} does not exist. Expected one of {', '.join(_LEVELS)}")
        if not logging.getLogger("popart").handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname).1s: %(message)s"))
            logging.getLogger("popart").addHandler(handler)
            logging.addLevelName(_TRACE, "TRACE")
        self.logger.setLevel(_LEVELS[name])

    def trace(self, message: str, *args: Any) -> None:
        """Log a message at level TRACE."""
        self.log(_TRACE, message, *args)

    def warn(self, message: str, *args: Any) -> None:  # type: ignore[override]
        """Log a message at level WARN."""
        self.warning(message, *args)


def getLogger(name: str = "") -> Logger:
    """Return the logger of a PopART module: ``ir``, ``session``, ``devicex`` and so on; of all without a name."""
    return Logger(name)
