"""A process that is asked to end, by SIGTERM, leaves its job without harm to the others."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from horovod import context
from horovod.logs import logger

__all__ = ["leaving_allowed", "on_leave", "run_functions", "was_asked"]

F = TypeVar("F", bound=Callable[[], Any])

_functions: list[Callable[[], Any]] = []
_is_asked = False
#: The handler of SIGTERM without this module.
_before: Any = signal.SIG_DFL


def on_leave(function: F) -> F:
    """Have a function called before this process leaves its job, because SIGTERM asked it to or its host is withdrawn.

    In an elastic job the others take over at the next commit or step. Then the functions run, the last one that was
    added first, and the process ends with exit code 0. A machine that is taken away grants some seconds for all of
    this. Elsewhere the functions run at once, and SIGTERM then does what it did before.

    Args:
        function: takes no arguments and calls no collectives.

    Returns:
        The function, so that this can be a decorator.
    """
    _functions.append(function)
    if len(_functions) == 1 and not _is_ours():
        _listen(_end_at_once)
    return function


def run_functions() -> None:
    """Call the functions, each once, whatever they raise."""
    while _functions:
        try:
            _functions.pop()()
        except Exception:
            logger.exception("a function of hvd.on_leave failed")


def was_asked() -> bool:
    """Return whether SIGTERM has asked this process to leave its elastic job."""
    return _is_asked


@contextmanager
def leaving_allowed() -> Iterator[None]:
    """While the context lasts, let SIGTERM ask the job service for a membership without this process."""
    listens = context.is_elastic() and _listen(_ask)
    try:
        yield
    finally:
        if listens:
            _listen(_end_at_once if _functions else _before)


def _is_ours() -> bool:
    return signal.getsignal(signal.SIGTERM) in (_ask, _end_at_once)


def _listen(handler: Any) -> bool:
    """Set the handler of SIGTERM; return False where that is not possible."""
    global _before
    if threading.current_thread() is not threading.main_thread():
        return False
    if not _is_ours():
        _before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
    signal.signal(signal.SIGTERM, handler)
    return True


def _ask(signum: int, frame: FrameType | None) -> None:
    global _is_asked
    _is_asked = True
    # A second signal means that it is urgent.
    signal.signal(signal.SIGTERM, _end_at_once)
    context.leave_job()


def _end_at_once(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, _before)
    run_functions()
    os.kill(os.getpid(), signal.SIGTERM)
