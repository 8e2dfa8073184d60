"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that resembles it most; empty when none does.

    Args:
        name: what was written.
        known: what could have been meant.
    """
    by_lower = {entry.lower(): entry for entry in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.75)
    return by_lower[found[0]] if found else ""
