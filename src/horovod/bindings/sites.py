"""The user's line, kept for code that runs later on a thread without frames of the user's script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import msgspec

from horovod.bindings.unsafe import as_if_called_from
from horovod.engine import callsite

__all__ = ["Site", "user_site"]


class Site(msgspec.Struct, frozen=True, array_like=True):
    """A line of the user's script."""

    file: str = "<unknown>"  # path of the script
    line: int = 0
    function: str = ""  # name of the enclosing function

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def short(self) -> str:
        """File name and line, without the folder, which may differ between hosts."""
        return f"{PurePath(self.file).name}:{self.line}"

    def stand_in(self) -> Callable[[Callable[[], Any]], Any]:
        """Return ``fn(function)``, which calls ``function`` from a frame that looks like the user's line.

        With this frame on the stack, errors and reports of stuck ranks name the user's line.
        """
        return as_if_called_from(self.file, self.line, self.function or "<module>")


def user_site() -> Site:
    """Return the line of the user's script that is running now."""
    frame = callsite.user_frame()
    return Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
