"""The user's line, kept for code that runs later, on a thread which knows nothing of the user's script."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import msgspec

from horovod.engine import callsite

__all__ = ["Site", "user_site"]


class Site(msgspec.Struct, frozen=True, array_like=True):
    """A line of the user's script.

    Attributes:
        file: its path.
        line: its number.
        function: what it belongs to.
    """

    file: str = "<unknown>"
    line: int = 0
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def short(self) -> str:
        """Without the folder, which may differ between hosts."""
        return f"{PurePath(self.file).name}:{self.line}"

    def stand_in(self) -> Callable[[Callable[[], Any]], Any]:
        """Return ``fn(function)``, which calls the function as if the user's line did.

        With this frame on the stack, errors and reports of stuck ranks name the user's line as they do everywhere else.
        """
        code = _call.__code__.replace(
            co_filename=self.file, co_firstlineno=self.line, co_name=self.function or "<module>"
        )
        return types.FunctionType(code, {"__name__": "__main__"})


_call = lambda function: function()  # noqa: E731  on one line, whose number is replaced


def user_site() -> Site:
    """Return the line of the user's script that is running now."""
    frame = callsite.user_frame()
    return Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
