"""Collects the messages that horovod logs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def heard(level: str = "", form: str = "%(message)s") -> Iterator[list[str]]:
    """Collect the messages of a block, at the log's own level unless another one is named."""
    found: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("horovod")
    handler.setFormatter(logging.Formatter(form))
    handler.emit = lambda record: found.append(handler.format(record))  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level or before)
    try:
        yield found
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
