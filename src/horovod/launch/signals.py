"""Selects the signals to this process that concern the job, and installs their handlers."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

__all__ = ["ToldToEnd", "handled", "held_back", "told_to_end", "wanted_signals"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ToldToEnd(BaseException):
    """A signal ends the work in progress; no error, to be caught only where the process ends."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = signal.Signals(number)
        #: A line for the user.
        self.text = f"{self.number.name} received; no rank was started"


def wanted_signals() -> list[signal.Signals]:
    """Return the signals to handle; ignored ones stay ignored: SIGHUP under nohup, SIGTSTP without job control."""
    return [s for s in _SIGNALS if s == signal.SIGINT or signal.getsignal(s) != signal.SIG_IGN]


@contextlib.contextmanager
def handled(signals: Sequence[signal.Signals], handle: Callable[[int], None]) -> Iterator[None]:
    """Handle signals meanwhile, and restore the old handlers afterwards; only on the main thread."""
    if threading.current_thread() is not threading.main_thread():
        signals = ()
    before = {number: signal.signal(number, lambda number, _: handle(number)) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Hold back the signals that end the job while modules are loaded.

    An exception in the middle of that may get lost, or leave an extension half made: msgspec then crashes later.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def told_to_end() -> Iterator[None]:
    """Make the first signal that ends the job raise ``ToldToEnd``; further ones change nothing.

    This works only on the main thread.

    Raises:
        ToldToEnd: a signal came.
    """
    came: list[int] = []

    def handle(number: int) -> None:
        came.append(number)
        if len(came) == 1:
            raise ToldToEnd(number)

    with handled([number for number in wanted_signals() if number in _ENDING], handle):
        try:
            yield
        finally:
            if came:  # a module that was being loaded may have caught the first one
                raise ToldToEnd(came[0])
