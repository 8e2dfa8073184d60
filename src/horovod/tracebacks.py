"""Reduces tracebacks to the user's lines: errors of this package explain themselves without frames of packages."""

from __future__ import annotations

import dis
import logging
from types import CodeType, TracebackType

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
    """Reduce the tracebacks of an error and of its causes to the user's lines, if the error explains itself.

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
    """Return a traceback of the user's lines only; unchanged, if there is no such line."""
    short: TracebackType | None = None
    for entry in reversed(_entries(trace)):
        is_told = short is not None and _line(short) == _line(entry)
        if _package(entry) not in PLUMBING and not is_told:
            short = TracebackType(short, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return trace if short is None else short


def _speaks_for_itself(error: BaseException) -> bool:
    if isinstance(error, _SPEAK_FOR_THEMSELVES):
        return True
    if error.__traceback__ is None:
        return False
    innermost = _entries(error.__traceback__)[-1]
    if isinstance(error, KeyboardInterrupt):
        return _package(innermost) == "horovod"
    if not isinstance(error, _RAISED_FOR_THE_USER):
        return False
    instruction = innermost.tb_frame.f_code.co_code[innermost.tb_lasti]
    return _package(innermost) == "horovod" and dis.opname[instruction] == "RAISE_VARARGS"


def _entries(trace: TracebackType | None) -> list[TracebackType]:
    found = []
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def _line(entry: TracebackType) -> tuple[CodeType, int]:
    return entry.tb_frame.f_code, entry.tb_lineno


def _package(entry: TracebackType) -> str:
    return str(entry.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
