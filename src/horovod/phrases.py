"""Lists in words, for messages, and text that any stream can show."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

__all__ = ["discard_output", "few", "list_ranks", "printable", "show_any_text"]

_NAMED = 3


def few(names: Sequence[object]) -> str:
    """Return the first few names, and the number of the others."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(str(name) for name in names[:_NAMED]) + more


def list_ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 1, 2, 3``."""
    listed = [str(rank) for rank in ranks]
    return f"rank{'s' * (len(listed) != 1)} {', '.join(listed)}"


def printable(text: str) -> str:
    """Return ``text`` so that UTF-8 can hold it: lone surrogates, as of a path in Latin-1, become ``\\udce9``."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def discard_output() -> None:
    """Discard unprinted output: otherwise Python would flush it at exit, and report the error once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_any_text(stream: TextIO) -> None:
    """Make a stream escape characters that its encoding lacks, as under LC_ALL=C, instead of raising an error."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors="backslashreplace")
