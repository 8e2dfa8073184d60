"""Whether Python code can break into what a thread is doing: into the main thread, by handlers of signals.

An exception that comes out of nowhere would leave the engine half changed. So a thread may do the engine's work itself,
which saves to hand it over, only where none can come. That is any thread but the main one; and the main one as long as
no signal has a handler of the script's, and nothing traces it. Ctrl-C has Python's own handler: this one stands in for
it, and lets KeyboardInterrupt wait until the work in hand is done. A second Ctrl-C does not wait.
"""

from __future__ import annotations

import importlib
import signal
import sys
import threading
from _thread import get_ident
from collections.abc import Callable
from types import FrameType
from typing import Any

from horovod.engine.records import now

__all__ = ["Guard", "trust"]

# Without the wrapper of ``signal``, which makes an enum of what it finds.
_handler_of: Callable[[int], Any] = importlib.import_module("_signal").getsignal
_NAMES = ("INT", "TERM", "HUP", "ALRM", "USR1", "USR2")
#: Looked at in every call; the others every tenth of a second.
_COMMON = tuple([int(getattr(signal, f"SIG{name}")) for name in _NAMES if hasattr(signal, f"SIG{name}")])
_EVERY_NS = 100_000_000

_trusted: set[object] = {None, int(signal.SIG_DFL), int(signal.SIG_IGN)}


def trust(handler: Callable[..., Any]) -> None:
    """Let a handler of a signal count as one that raises nothing, and calls no collective.

    Args:
        handler: a function; for methods, that of the class.
    """
    _trusted.add(handler)


class Guard:
    """Says who may do the engine's work.

    Args:
        wake: called before KeyboardInterrupt is raised: what was submitted last may not have been seen.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._main = threading.main_thread().ident
        self._found: tuple[Any, ...] = ()
        self._looked_ns = 0
        self._is_inside = False
        #: Whether a KeyboardInterrupt waits.
        self.is_pending = False

    def install(self) -> None:
        """Stand in for Python's own handler of Ctrl-C, if that is in place."""
        before = signal.getsignal(signal.SIGINT)
        is_ours = before is signal.default_int_handler or getattr(before, "__func__", None) is Guard._interrupt
        if get_ident() == self._main and is_ours:
            signal.signal(signal.SIGINT, self._interrupt)

    def remove(self) -> None:
        """Put Python's own handler back."""
        if get_ident() == self._main and signal.getsignal(signal.SIGINT) == self._interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def allows(self) -> bool:
        """Whether nothing can break into the calling thread between ``enter`` and ``leave``."""
        if get_ident() != self._main:
            return True
        if sys.gettrace() is not None:
            return False
        found = tuple(map(_handler_of, _COMMON))
        if found == self._found and now() - self._looked_ns < _EVERY_NS:
            return True
        if not all(_is_trusted(number) for number in signal.valid_signals()):
            return False
        self._found, self._looked_ns = found, now()
        return True

    def enter(self) -> bool:
        """Let KeyboardInterrupt wait, if this is the thread that it would interrupt; return whether it is."""
        if get_ident() != self._main:
            return False
        self._is_inside = True
        return True

    def leave(self) -> None:
        """Let it wait no more; called only where ``enter`` returned True.

        Raises:
            KeyboardInterrupt: it has waited.
        """
        self._is_inside = False
        if self.is_pending:
            self.is_pending = False
            raise KeyboardInterrupt

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_inside and not self.is_pending:
            self.is_pending = True
            return
        self.is_pending = False
        self._wake()
        signal.default_int_handler(number, frame)


def _is_trusted(number: int) -> bool:
    handler = _handler_of(number)
    return getattr(handler, "__func__", handler) in _trusted


trust(Guard._interrupt)
