"""Makes tracebacks end with the user's line: errors of this package explain themselves without its frames."""

from __future__ import annotations

import dis
import logging
from types import TracebackType

from horovod.errors import DuplicateNameError, HorovodInternalError, OptimizerUseError
from horovod.logs import logger

__all__ = ["PLUMBING", "shorten", "without_plumbing"]

#: Packages whose frames are plumbing: the user's line is the last one outside them.
PLUMBING = frozenset({
    "horovod", "torch", "numpy", "tensorflow", "keras", "tf_keras", "jax", "optax", "flax", "equinox",
    "popart", "popdist", "poptorch", "khorovod_ipu",
    "contextlib", "functools",
})  # fmt: skip

_SPEAK_FOR_THEMSELVES = (HorovodInternalError, DuplicateNameError, OptimizerUseError)
#: These explain themselves only if this package raised them on purpose, not if something inside it failed.
_RAISED_FOR_THE_USER = (ValueError, TypeError, NotImplementedError, AttributeError)


def shorten(error: BaseException) -> None:
    """End the tracebacks of an error and of its causes with the user's line, if the error explains itself.

    With HOROVOD_LOG_LEVEL=debug they stay as they are.
    """
    if logger.isEnabledFor(logging.DEBUG):
        return
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if _speaks_for_itself(current):
            current.__traceback__ = without_plumbing(current.__traceback__)
        current = current.__cause__ or current.__context__


def without_plumbing(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback that ends with the user's line; unchanged, if there is no such line."""
    entries = _entries(trace)
    while entries and _package(entries[-1]) in PLUMBING:
        entries.pop()
    if not entries:
        return trace
    short = None
    for entry in reversed(entries):
        short = TracebackType(short, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return short


def _speaks_for_itself(error: BaseException) -> bool:
    if isinstance(error, _SPEAK_FOR_THEMSELVES):
        return True
    if not isinstance(error, _RAISED_FOR_THE_USER) or error.__traceback__ is None:
        return False
    innermost = _entries(error.__traceback__)[-1]
    instruction = innermost.tb_frame.f_code.co_code[innermost.tb_lasti]
    return _package(innermost) == "horovod" and dis.opname[instruction] == "RAISE_VARARGS"


def _entries(trace: TracebackType | None) -> list[TracebackType]:
    found = []
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def _package(entry: TracebackType) -> str:
    return str(entry.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
