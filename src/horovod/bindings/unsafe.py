"""Code that depends on how CPython is built; where that has changed, everything works with less."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

__all__ = ["as_if_called_from"]

_call = lambda function: function()  # noqa: E731  on one line, whose number is replaced


def as_if_called_from(file: str, line: int, function: str) -> Callable[[Callable[[], Any]], Any]:
    """Return ``fn(function)``, which calls the function from a frame that has another file, line and name.

    Without code objects that can be changed, the frame is that of this module, and errors name its line.

    Args:
        file: path.
        line: its number.
        function: name of the calling function.
    """
    try:
        code = _call.__code__.replace(co_filename=file, co_firstlineno=line, co_name=function)
        return types.FunctionType(code, {"__name__": "__main__"})
    except (AttributeError, TypeError, ValueError):
        return _call
