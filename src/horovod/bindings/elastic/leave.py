"""Let a process that receives SIGTERM leave its job without harm to the other ranks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from horovod import context
from horovod.engine.signals import obey_sigterm
from horovod.logs import logger

__all__ = ["leaving_allowed", "on_leave", "run_functions", "was_asked"]

F = TypeVar("F", bound=Callable[[], Any])

_functions: list[Callable[[], Any]] = []
_is_asked = False
#: The handler of SIGTERM before this module replaced it.
_before: Any = signal.SIG_DFL


def on_leave(function: F) -> F:
    """Register a function to call before this process leaves its job after SIGTERM or after losing its host.

    In an elastic job the other ranks take over at the next commit or step. Then the functions run in reverse order of
    registration, and the process ends with exit code 0. A preempted machine grants only some seconds for all of this.
    In other jobs the functions run immediately, and then the previous handler of SIGTERM runs.

    Args:
        function: takes no arguments and calls no collectives.

    Returns:
        The function, so that ``on_leave`` can be used as a decorator.
    """
    _functions.append(function)
    if len(_functions) == 1 and not _is_ours():
        _listen(_end_at_once)
    return function


def run_functions() -> None:
    """Call each registered function once; log an exception, also that of ``sys.exit``, and go on."""
    while _functions:
        try:
            _functions.pop()()
        except (Exception, SystemExit):
            logger.exception("a function of hvd.on_leave failed")


def was_asked() -> bool:
    """Return whether SIGTERM has asked this process to leave its elastic job."""
    return _is_asked


@contextmanager
def leaving_allowed() -> Iterator[None]:
    """Return a context in which SIGTERM makes this process ask the job service for a membership without it."""
    listens = context.is_elastic() and _listen(_ask)
    try:
        yield
    finally:
        if listens:
            _listen(_end_at_once if _functions else _before)


def _is_ours() -> bool:
    return signal.getsignal(signal.SIGTERM) in (_ask, _end_at_once)


def _listen(handler: Any) -> bool:
    """Set the handler of SIGTERM; return False in threads other than the main thread."""
    global _before
    if threading.current_thread() is not threading.main_thread():
        return False
    if not _is_ours():
        obey_sigterm()
        _before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
    signal.signal(signal.SIGTERM, handler)
    return True


def _ask(signum: int, frame: FrameType | None) -> None:
    global _is_asked
    if _is_asked:
        return  # a scheduler sends SIGTERM to all processes, and horovodrun, one of them, passes it on
    _is_asked = True
    _ignore_children()
    context.leave_job()


def _end_at_once(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, _before)
    _ignore_children()
    run_functions()
    os.kill(os.getpid(), signal.SIGTERM)


def _ignore_children() -> None:
    # SIGTERM to all processes of a rank ends its workers, too; PyTorch's DataLoader would raise an error for them.
    signal.signal(signal.SIGCHLD, lambda *_: None)


def _after_fork() -> None:
    # A forked process, such as a worker of multiprocessing, is not a rank: SIGTERM ends it.
    _functions.clear()
    if _is_ours():
        signal.signal(signal.SIGTERM, _before)


os.register_at_fork(after_in_child=_after_fork)
