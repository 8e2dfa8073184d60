"""Observes exceptions that end the script, or one of its threads, before Python prints them."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from horovod import tracebacks

__all__ = ["ErrorHooks"]


class ErrorHooks:
    """See the module.

    Args:
        note: called once with each exception that ends the script, before it is printed.
    """

    def __init__(self, note: Callable[[BaseException, TracebackType | None], None]) -> None:
        self._note = note
        self._hook: Callable[..., None] | None = None
        self._thread_hook: Callable[..., None] | None = None
        self._noted: BaseException | None = None

    def install(self) -> None:
        """Put our hooks before hooks that the script has set meanwhile."""
        if sys.excepthook is not self._hook:
            self._hook = sys.excepthook = functools.partial(self._show, sys.excepthook)
        if threading.excepthook is not self._thread_hook:
            self._thread_hook = threading.excepthook = functools.partial(_show_in_thread, threading.excepthook)

    def _show(
        self,
        next_hook: Callable[..., Any],
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        if self._noted is not error:  # a hook of the script may stand between two of ours
            self._noted = error
            self._note(error, trace)
        next_hook(kind, error, error.__traceback__)


def _show_in_thread(next_hook: Callable[..., Any], ended: threading.ExceptHookArgs) -> None:
    """Show the exception that ends a thread of the script, without frames of this package; the script goes on."""
    if (error := ended.exc_value) is not None:
        tracebacks.shorten(error.with_traceback(ended.exc_traceback))
        ended = threading.ExceptHookArgs((ended.exc_type, error, error.__traceback__, ended.thread))
    next_hook(ended)
