"""Exceptions, under PopART's names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["OutOfMemoryException", "nearest", "popart_exception", "unknown"]


class popart_exception(RuntimeError):
    """A model cannot be built or run; the message says what was received and what to do."""


class OutOfMemoryException(popart_exception):
    """The device has not enough memory; the software device never raises it, scripts may catch it."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for a misspelt word, or nothing."""
    found = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def unknown(what: str, word: str, known: Iterable[str]) -> popart_exception:
    """Return the error for a name that is not there.

    Args:
        what: what kind of thing it would be, as in ``a tensor of the graph``.
        word: what was received.
        known: the existing names.
    """
    names = sorted(known)
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    hint = nearest(word, names) or "."
    return popart_exception(f"{word!r} is not {what}{hint} There is: {shown or 'nothing'}")
