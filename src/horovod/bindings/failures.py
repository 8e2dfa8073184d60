"""Keeps errors of collectives inside compiled programs, because the framework passes on only their text."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from horovod.errors import HorovodInternalError

__all__ = ["remember", "typed"]

_LIMIT = 16
_lock = threading.Lock()
_kept: list[BaseException] = []


def remember(error: BaseException) -> None:
    """Keep an error before it is raised through a framework."""
    with _lock:
        _kept.append(error)
        del _kept[:-_LIMIT]


def _original(error: BaseException) -> BaseException | None:
    text = str(error)
    with _lock:
        # KeyboardInterrupt has no text.
        return next((kept for kept in reversed(_kept) if (str(kept) or type(kept).__name__) in text), None)


@contextmanager
def typed(kinds: tuple[type[BaseException], ...]) -> Iterator[None]:
    """Raise the original error of a collective if a framework converted it into its own error.

    Raises:
        HorovodInternalError: a collective failed; the framework's error is its ``__cause__``.
        KeyboardInterrupt: the user interrupted the collective.
    """
    try:
        yield
    except kinds as error:
        original = None if isinstance(error, HorovodInternalError) else _original(error)
        if original is None:
            raise
        raise original from error
