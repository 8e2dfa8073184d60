"""Code that depends on CPython internals; if they change, only the user's line in messages is lost."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

__all__ = ["as_if_called_from"]

_call = lambda function: function()  # noqa: E731  on one line, because its line number is replaced


def as_if_called_from(file: str, line: int, function: str) -> Callable[[Callable[[], Any]], Any]:
    """Return ``fn(function)``, which calls ``function`` from a frame with the given file, line and name.

    If code objects cannot be changed, the frame is one of this module, and errors name its line.
    """
    try:
        code = _call.__code__.replace(co_filename=file, co_firstlineno=line, co_name=function)
        return types.FunctionType(code, {"__name__": "__main__"})
    except (AttributeError, TypeError, ValueError):
        return _call
