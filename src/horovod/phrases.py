"""Lists and sizes in words, for messages, and text that any stream can show."""

from __future__ import annotations

import io
import itertools
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

__all__ = ["discard_output", "few", "format_bytes", "list_ranks", "nearest", "printable", "show_any_text"]

_NAMED = 3
_SHORT_RUN = 5
_TOO_SHORT = len("--log")  # for first words of a flag


def few(names: Sequence[object]) -> str:
    """Return the first few names, and the number of the others."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(str(name) for name in names[:_NAMED]) + more


def list_ranks(ranks: Iterable[int], noun: str = "rank") -> str:
    """Return ``rank 3`` or ``ranks 1, 2, 3``, with long runs as in ``ranks 0-63, 65``."""
    listed, parts = list(ranks), []
    for _, run in itertools.groupby(enumerate(listed), lambda place: place[1] - place[0]):
        numbers = [str(number) for _, number in run]
        parts += numbers if len(numbers) <= _SHORT_RUN else [f"{numbers[0]}-{numbers[-1]}"]
    return f"{noun}{'s' * (len(listed) != 1)} {', '.join(parts)}"


def format_bytes(nbytes: float) -> str:
    """Write a number of bytes with the unit a reader expects: ``64 B``, ``1.5 KiB``, ``256 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024 or unit == "GiB":
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    raise AssertionError("unreachable")


def nearest(name: str, known: Sequence[str]) -> str:
    """Return the name that was meant by a misspelt one, or by its first words; empty if no name is close."""
    import difflib

    starts: dict[str, str] = {}
    for entry in sorted(known, key=len, reverse=True):
        words = entry.split("-")
        firsts = ("-".join(words[:count]) for count in range(1, len(words)))
        starts |= dict.fromkeys((first for first in firsts if len(first) > _TOO_SHORT), entry)
        starts[entry] = entry
    close = difflib.get_close_matches(name, starts, 1, 0.8)
    return starts[close[0]] if close else ""


def printable(text: str) -> str:
    """Return ``text`` so that UTF-8 can hold it: lone surrogates, as of a path in Latin-1, become ``\\udce9``."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def discard_output(stream: TextIO | None = None) -> None:
    """Discard unprinted output: otherwise Python would flush it at exit, fail again, and end with exit code 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), (sys.stdout if stream is None else stream).fileno())


def show_any_text(stream: TextIO) -> None:
    """Make a stream escape characters that its encoding lacks, as under LC_ALL=C, instead of raising an error."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors="backslashreplace")
