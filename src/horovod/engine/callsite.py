"""Where in the user's code a collective was called."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from horovod.phrases import printable
from horovod.tracebacks import PLUMBING

__all__ = ["describe", "here", "user_frame"]

# By id of a code object, whether it is plumbing; the list keeps the objects alive, so that no id is reused.
_plumbing: dict[int, bool] = {}
_known: list[CodeType] = []
_MOST = 65536


def user_frame() -> FrameType:
    """Return the innermost frame of user code; on a thread without user code, the outermost frame.

    The caller must be a function of this package; its own frame is never returned.
    """
    frame = sys._getframe(2)
    try:
        while _plumbing[id(frame.f_code)]:
            frame = frame.f_back  # type: ignore[assignment]
    except KeyError:
        _learn(frame)
        return user_frame()
    except AttributeError:  # there is no frame beyond the outermost
        return _outermost()
    return frame


def _outermost() -> FrameType:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _learn(frame: FrameType) -> None:
    name = frame.f_globals.get("__name__", "")
    inside = name.partition(".")[0] in PLUMBING and not name.startswith("horovod.bench")
    if len(_known) > _MOST:
        _plumbing.clear()
        _known.clear()
    _known.append(frame.f_code)
    _plumbing[id(frame.f_code)] = inside


def describe(frame: FrameType) -> str:
    """Return ``file:line`` of a frame."""
    return printable(f"{frame.f_code.co_filename}:{frame.f_lineno}")


def here() -> str:
    """Return ``at file:line`` of the user's line; empty on a thread without user code, as those of autograd."""
    frame = user_frame()
    return "" if _plumbing[id(frame.f_code)] else f"at {describe(frame)}"
