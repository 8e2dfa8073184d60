"""Which signals to this process are meant for the job, and who answers them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

__all__ = ["ToldToEnd", "handled", "told_to_end", "wanted_signals"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGUSR1)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ToldToEnd(BaseException):
    """A signal ends what is under way; no error, and nothing to catch but where the process ends.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = signal.Signals(number)


def wanted_signals() -> list[signal.Signals]:
    """Hanging up is ignored under nohup, and stays so; Ctrl-Z only means us where a shell controls jobs."""
    return [s for s in _SIGNALS if s == signal.SIGINT or signal.getsignal(s) != signal.SIG_IGN]


@contextlib.contextmanager
def handled(signals: Sequence[signal.Signals], handle: Callable[[int], None]) -> Iterator[None]:
    """Have a function called for signals meanwhile, and who had them before afterwards; only on the main thread.

    Args:
        signals: which.
        handle: called with the number of each that comes.
    """
    if threading.current_thread() is not threading.main_thread():
        signals = ()
    before = {number: signal.signal(number, lambda number, _: handle(number)) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def told_to_end() -> Iterator[None]:
    """Have the first signal that ends the job raise ``ToldToEnd`` meanwhile; more of them change nothing.

    Only heeded on the main thread.

    Raises:
        ToldToEnd: a signal came.
    """
    came: list[int] = []

    def handle(number: int) -> None:
        came.append(number)
        if len(came) == 1:
            raise ToldToEnd(number)

    with handled([number for number in wanted_signals() if number in _ENDING], handle):
        yield
