"""Errors of collectives inside compiled programs: JAX passes on their text only, so they are kept here."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from horovod import context
from horovod.bindings.numpy_adapter import NumpyAdapter
from horovod.errors import HorovodInternalError

__all__ = ["let_go", "remember", "typed_errors"]

_LIMIT = 16
_lock = threading.Lock()
_kept: list[BaseException] = []


def remember(error: BaseException) -> None:
    """Keep an error that is about to go through XLA."""
    with _lock:
        _kept.append(error)
        del _kept[:-_LIMIT]


def let_go(memory: Sequence[Any]) -> None:
    """Let nothing that is in flight touch XLA's memory any more, which XLA takes back when a call of it fails.

    Operations that failed on all ranks have ended. Those that Ctrl-C interrupted go on with copies, for other ranks.

    Args:
        memory: arrays of numpy on it.
    """

    def act() -> None:
        for handle in engine.in_flight():
            arrays = [*handle.inputs, *handle.outputs]
            if any(np.may_share_memory(array, ours) for array in arrays for ours in memory):
                # In place stays in place.
                copies = {id(array): np.array(array) for array in arrays}
                handle.allocator = NumpyAdapter()
                handle.inputs = [copies[id(array)] for array in handle.inputs]
                handle.outputs = [copies[id(array)] for array in handle.outputs]

    engine = context.engine()
    if engine.in_flight():
        engine.pause(act)


def _original(error: BaseException) -> BaseException | None:
    text = str(error)
    with _lock:
        # KeyboardInterrupt has no text.
        return next((kept for kept in reversed(_kept) if (str(kept) or type(kept).__name__) in text), None)


@contextmanager
def typed_errors() -> Iterator[None]:
    """Raise horovod's own exceptions for collectives that fail inside compiled programs.

    JAX raises ``jax.errors.JaxRuntimeError``, or ``ValueError``, for any error in a program, when the program
    runs or when its results are used. Inside this block, also as a decorator, what a collective raised is raised again
    as what it is, such as ``PeerLostError``; Ctrl-C while it waited is ``KeyboardInterrupt``.

    Raises:
        HorovodInternalError: a collective failed; JAX's error is its ``__cause__``.
        KeyboardInterrupt: it was interrupted.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        original = None if isinstance(error, HorovodInternalError) else _original(error)
        if original is None:
            raise
        raise original from error
