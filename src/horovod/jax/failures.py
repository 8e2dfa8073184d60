"""Errors of collectives inside compiled programs: JAX passes on their text only, so they are kept here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from horovod.errors import HorovodInternalError

__all__ = ["remember", "typed_errors"]

_LIMIT = 16
_lock = threading.Lock()
_kept: list[BaseException] = []


def remember(error: BaseException) -> None:
    """Keep an error that is about to go through XLA."""
    with _lock:
        _kept.append(error)
        del _kept[:-_LIMIT]


def _original(error: BaseException) -> BaseException | None:
    text = str(error)
    with _lock:
        return next((kept for kept in reversed(_kept) if str(kept) and str(kept) in text), None)


@contextmanager
def typed_errors() -> Iterator[None]:
    """Raise horovod's own exceptions for collectives that fail inside compiled programs.

    JAX raises ``jax.errors.JaxRuntimeError``, or ``ValueError``, for whatever happens in a program, when the program
    runs or when its results are used. Inside this block, also as a decorator, what a collective raised is raised again
    as what it is, such as ``PeerLostError``.

    Raises:
        HorovodInternalError: a collective failed; JAX's error is its ``__cause__``.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        original = None if isinstance(error, HorovodInternalError) else _original(error)
        if original is None:
            raise
        raise original from error
