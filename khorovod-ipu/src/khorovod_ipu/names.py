"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]


def nearest(name: str, known: Iterable[str], dashes: str = "") -> str:
    """Return ``; did you mean 'x'?`` for a misspelt name; empty when no known name resembles it.

    Args:
        name: the misspelt name.
        known: the existing names.
        dashes: shown before the suggestion, instead of quotes around it.
    """
    by_lower = {entry.lower(): entry for entry in known}
    found = [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=1)]
    return "".join(f"; did you mean {f'{dashes}{match}' if dashes else repr(match)}?" for match in found)
