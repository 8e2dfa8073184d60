"""Exceptions out of nowhere: raised at a chosen line of this package, as a signal handler could raise them there."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import horovod

__all__ = ["Boom", "at_every_line", "at_line"]

_HOME = str(Path(horovod.__file__).parent)


class Boom(BaseException):
    """An error that no code expects."""


@contextlib.contextmanager
def at_line(number: int, by_instruction: bool = False) -> Iterator[list[str]]:
    """Raise ``Boom`` when this thread comes to the ``number``-th line of this package, counted from 1.

    Args:
        number: which.
        by_instruction: count instructions instead.

    Yields:
        Where it was raised, once it was.
    """
    left, raised = number, list[str]()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(_HOME):
            return None
        frame.f_trace_opcodes = by_instruction
        if event == ("opcode" if by_instruction else "line"):
            left -= 1
            if not left:
                sys.settrace(None)
                raised.append(f"{frame.f_code.co_filename.removeprefix(_HOME)}:{frame.f_lineno}")
                raise Boom(raised[0])
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield raised
    finally:
        sys.settrace(before)


def at_every_line(act: Callable[[int], Any], recover: Callable[[int, str], None], by_instruction: bool = False) -> int:
    """Do something again and again, interrupted one line later each time, until it comes through.

    Args:
        act: what to do; gets the number of the line.
        recover: called after an interrupt, with that number and the line.
        by_instruction: go from instruction to instruction instead.

    Returns:
        How often it was interrupted.
    """
    for number in itertools.count(1):
        try:
            with at_line(number, by_instruction) as raised:
                act(number)
        except Boom:
            recover(number, raised[0])
        else:
            return number - 1
    raise AssertionError
