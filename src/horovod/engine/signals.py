"""Defers signal handlers while the main thread does the engine's work.

An exception of a handler would leave the engine half changed. So a thread may do the engine's work itself only where no
handler can raise. This is true of all threads but the main one. It is true of the main one if nothing traces it and no
timer has a handler of the script, because that is there to end a wait. During the work, a stand-in replaces the
script's handlers of all other signals, and defers them until the current work is done. Python's own handler of Ctrl-C
is always deferred in this way. A second Ctrl-C or SIGTERM is not deferred.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import os
import signal
import sys
import threading
from _thread import get_ident
from collections.abc import Callable
from types import FrameType
from typing import Any

from horovod.engine.times import now

__all__ = ["DeferredSignals", "obey_sigterm", "trust"]

# Bypass the wrappers of ``signal``, which convert their results to enums.
_handler_of: Callable[[int], Any] = importlib.import_module("_signal").getsignal
_set_handler: Callable[[int, Any], Any] = importlib.import_module("_signal").signal


def _numbers(*names: str) -> tuple[int, ...]:
    return tuple([int(getattr(signal, f"SIG{name}")) for name in names if hasattr(signal, f"SIG{name}")])


#: Checked in every call. A check of all signals takes a fifth of a small call, so the others are checked only after
#: _EVERY_NS: a handler that is set in between, and whose signal comes in between, would interrupt the work.
_COMMON = _numbers("INT", "TERM", "HUP", "ALRM", "VTALRM", "PROF", "USR1", "USR2", "CHLD")
_ALL = tuple(sorted(map(int, signal.valid_signals())))
_EVERY_NS = 500_000
_OF_TIMERS = _numbers("ALRM", "VTALRM", "PROF")
#: A second one is not deferred: the current work may wait for a rank that does not go on.
_INSISTENT = _numbers("INT", "TERM")

_trusted: set[object] = {None, int(signal.SIG_DFL), int(signal.SIG_IGN)}


def trust(handler: Callable[..., Any]) -> None:
    """Register a signal handler, a function, as one that raises nothing and calls no collective."""
    _trusted.add(handler)


def obey_sigterm() -> None:
    """Let SIGTERM end the first process of a container, in which the kernel ignores signals without a handler."""
    is_main = get_ident() == threading.main_thread().ident
    if os.getpid() == 1 and is_main and _handler_of(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)
        os.register_at_fork(after_in_child=_disobey)


def _disobey() -> None:
    if _handler_of(signal.SIGTERM) is _end:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    if _handler_of(number) is _end:  # else the handler that has replaced it calls it, and decides itself
        os._exit(128 + number)


class DeferredSignals:
    """Decides whether a thread may do the engine's work, and defers signals meanwhile.

    ``wake`` is called before a deferred handler, since this may raise before the last submission was seen.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._main = threading.main_thread().ident
        self._found: tuple[Any, ...] = ()
        self._found_of_all: tuple[Any, ...] = ()
        self._looked_ns = 0
        self._is_inside = self._is_over = self._is_interrupted = False
        # Signals with handlers of the script, these handlers, and the signals that the stand-in has deferred.
        self._foreign: tuple[int, ...] = ()
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._waiting: collections.deque[tuple[int, FrameType | None]] = collections.deque()
        #: Whether a handler is deferred.
        self.is_pending = False

    def install(self) -> None:
        """Replace Python's own handler of Ctrl-C, if it is in place."""
        before = signal.getsignal(signal.SIGINT)
        is_ours = (
            before is signal.default_int_handler or getattr(before, "__func__", None) is DeferredSignals._interrupt
        )
        if get_ident() == self._main and is_ours:
            signal.signal(signal.SIGINT, self._interrupt)

    def remove(self) -> None:
        """Restore Python's own handler and those of the script."""
        if get_ident() != self._main:
            return
        self._put_back()
        if signal.getsignal(signal.SIGINT) == self._interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def allows(self) -> bool:
        """Whether nothing can interrupt the calling thread between ``enter`` and ``leave``."""
        if get_ident() != self._main:
            return True
        if self._is_inside or sys.gettrace() is not None:
            # A finalizer cannot be deferred: it runs in the middle of the work.
            return False
        found = tuple(map(_handler_of, _COMMON))
        if found == self._found and now() - self._looked_ns < _EVERY_NS:
            return True
        found_of_all = tuple(map(_handler_of, _ALL))
        if found_of_all != self._found_of_all:
            foreign = tuple([number for number in _ALL if not _is_trusted(number)])
            if not all(number not in _OF_TIMERS and callable(_handler_of(number)) for number in foreign):
                return False
            self._foreign, self._found_of_all = foreign, found_of_all
        self._found, self._looked_ns = found, now()
        return True

    def enter(self) -> None:
        """Defer handlers, if this is the thread that they would interrupt. ``leave`` always follows."""
        if get_ident() != self._main:
            return
        self._is_over = False
        for number in self._foreign:
            handler = _handler_of(number)
            if callable(handler) and handler != self._stand_in:
                # Store it first, so that a signal that comes in between finds its handler.
                self._handlers[number] = handler
                _set_handler(number, self._stand_in)
        self._is_inside = True

    def leave(self) -> None:
        """Run the deferred handlers, and defer no more.

        Raises:
            KeyboardInterrupt: a Ctrl-C was deferred.
            BaseException: raised by a deferred handler.
        """
        if get_ident() != self._main:
            return
        self._is_over, self._is_inside = True, False
        if self._foreign:
            self._put_back()
        if not self.is_pending:
            return
        self._wake()
        self.is_pending = bool(self._waiting)
        while self._waiting:
            number, frame = self._waiting.popleft()
            self.is_pending = bool(self._waiting) or self._is_interrupted
            replaced = _handler_of(number)  # by the handler of an earlier signal, perhaps
            (replaced if callable(replaced) else self._handlers[number])(number, frame)
        if self._is_interrupted:
            self._is_interrupted = self.is_pending = False
            raise KeyboardInterrupt

    def _put_back(self) -> None:
        for number, handler in list(self._handlers.items()):
            if _handler_of(number) == self._stand_in:
                _set_handler(number, handler)

    def _stand_in(self, number: int, frame: FrameType | None) -> None:
        if self._is_inside:
            # Copy the queue in one step: the handler of another signal may add to it.
            first = next((one for one in list(self._waiting) if one[0] == number), None)
            if first is None:
                self._waiting.append((number, frame))
            if first is None or number not in _INSISTENT:
                self.is_pending = True
                return
            with contextlib.suppress(ValueError):  # another handler has removed it
                self._waiting.remove(first)
        elif self._is_over:
            self._put_back()  # before ``leave`` does; the script's handler may check which one is installed
        self._wake()
        self._handlers[number](number, frame)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_inside and not self._is_interrupted:
            self._is_interrupted = self.is_pending = True
            return
        self._is_interrupted = False
        self._wake()
        signal.default_int_handler(number, frame)


def _is_trusted(number: int) -> bool:
    handler = _handler_of(number)
    return getattr(handler, "__func__", handler) in _trusted


trust(_end)
trust(DeferredSignals._interrupt)
trust(DeferredSignals._stand_in)
