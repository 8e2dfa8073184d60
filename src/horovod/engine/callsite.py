"""Where in the user's code a collective was called."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from horovod.phrases import printable
from horovod.tracebacks import PLUMBING

__all__ = ["describe", "here", "user_frame"]

# Keeps each code object alive, so that its id stays its own.
_known: dict[int, tuple[CodeType, bool]] = {}


def user_frame() -> FrameType:
    """Return the innermost frame of user code; on a thread that runs none, the outermost of all."""
    frame: FrameType | None = sys._getframe(1)
    last = frame
    while frame is not None:
        code = frame.f_code
        known = _known.get(id(code))
        if known is None:
            package = frame.f_globals.get("__name__", "").partition(".")[0]
            inside = package in PLUMBING and not frame.f_globals.get("__name__", "").startswith("horovod.bench")
            if len(_known) > 65536:
                _known.clear()
            known = _known[id(code)] = (code, inside)
        if not known[1]:
            return frame
        last, frame = frame, frame.f_back
    assert last is not None
    return last


def describe(frame: FrameType) -> str:
    """Return ``file:line`` of a frame."""
    return printable(f"{frame.f_code.co_filename}:{frame.f_lineno}")


def here() -> str:
    """Return ``at file:line`` of the user's line, or nothing on a thread that runs none, such as one of autograd."""
    frame = user_frame()
    return "" if _known[id(frame.f_code)][1] else f"at {describe(frame)}"
