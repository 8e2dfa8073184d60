"""How this rank's script ends: exceptions that end it, and the reason that is sent to ranks that still wait for it."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from horovod import tracebacks
from horovod.core.labels import LEFT
from horovod.core.mismatch import describe_waiting
from horovod.engine import callsite
from horovod.engine.times import REQUEST, Ring
from horovod.errors import PeerLostError
from horovod.phrases import printable

__all__ = ["Ending", "ErrorHooks"]


class Ending:
    """The reason why this rank's script ends, as far as it is known."""

    def __init__(self) -> None:
        # its end by an exception, such as "ended with ValueError: bad batch at train.py:7"; or empty
        self.exception = ""

    def note(self, error: BaseException, trace: TracebackType | None) -> None:
        """Remember an exception that ends the script; not a PeerLostError: the other ranks know that cause already."""
        if isinstance(error, PeerLostError):
            return
        own = tracebacks.without_plumbing(trace)
        while own is not None and own.tb_next is not None:
            own = own.tb_next
        place = f" at {own.tb_frame.f_code.co_filename}:{own.tb_lineno}" if own is not None else ""
        if own is not None and own.tb_frame.f_globals.get("__name__", "").startswith("horovod."):
            place = f" {callsite.here()}".rstrip()  # the exception has not come to the user's line yet
        place *= place not in str(error)
        kind = type(error).__name__
        self.exception = printable(f"ended with {kind}: {error}{place}" if str(error) else f"ended with {kind}{place}")

    def note_last(self) -> None:
        """Remember the exception that a caller such as horovod.run has caught and printed as Python does."""
        error = getattr(sys, "last_value", None)
        if error is not None and not self.exception:
            self.note(error, error.__traceback__)

    def reason(self, who: str, ring: Ring, how: str = "") -> str:
        """Return why this rank leaves now; without words for it, the place of the call of ``shutdown()``."""
        current = sys.exc_info()[1]
        if current is not None and not self.exception:
            # An error is on its way, for example in `finally: hvd.shutdown()`.
            self.note(current, current.__traceback__)
        if self.exception:
            return f"{who} {self.exception}"
        how = how or f"it called hvd.shutdown() {callsite.here()}".rstrip()
        last = f"; its last operation was {describe_waiting(ring[-1][REQUEST])}" if ring else ""
        return f"{who} {LEFT}: {how}{last}"


class ErrorHooks:
    """Observes exceptions that end the script, or one of its threads: calls ``note`` once before Python prints them."""

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
