"""Lists in words, as messages have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["few", "list_ranks", "printable"]

_NAMED = 3


def few(names: Sequence[object]) -> str:
    """Return the first few names, and how many there are besides."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(str(name) for name in names[:_NAMED]) + more


def list_ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 1, 2, 3``."""
    listed = [str(rank) for rank in ranks]
    return f"rank{'s' * (len(listed) != 1)} {', '.join(listed)}"


def printable(text: str) -> str:
    """Return ``text`` as UTF-8 can hold it: lone surrogates, such as bytes of a path in Latin-1, as ``\\udce9``."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()
