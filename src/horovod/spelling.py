"""Suggests the intended name for a misspelt one; suggests nothing if no name is close."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["nearest"]

_MOST_SLIPS = 3
_TELLING = 4  # fewest letters of a word that has a meaning alone


def nearest(name: str, known: Sequence[str]) -> str:
    """Return the entry of ``known`` that ``name`` was meant to be, or an empty text.

    A close name differs in a few letters, at most one in three, separators aside; or it has more words, such as
    ``--timeline-filename`` for ``--timeline``. Of several names the closest counts, then the shortest.
    """
    typed = _words(name)
    found = []
    for entry in known:
        meant = _words(entry)
        a, b = "".join(typed), "".join(meant)
        slips = _slips(a, b)
        if slips <= min(_MOST_SLIPS, len(a) // 3, len(b) // 3):
            found.append((slips, _slips(name, entry), entry))
        elif _leaves_words_out(typed, meant):
            found.append((_MOST_SLIPS + 1, len(entry), entry))
    return min(found)[2] if found else ""


def _words(name: str) -> list[str]:
    return re.findall(r"[^-_.]+", name.lower())


def _leaves_words_out(typed: Sequence[str], meant: Sequence[str]) -> bool:
    if not typed or typed[0] != meant[0] or len("".join(typed)) < _TELLING:
        return False
    rest = iter(meant)
    return all(word in rest for word in typed)


def _slips(a: str, b: str) -> int:
    """Return how many letters were left out, put in, replaced, or swapped with the next one.

    Source: optimal string alignment, https://en.wikipedia.org/wiki/Damerau-Levenshtein_distance.
    """
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        older, before, row = before, row, [i]
        for j, y in enumerate(b, 1):
            least = min(row[-1] + 1, before[j] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and a[i - 2] == y and x == b[j - 2]:
                least = min(least, older[j - 2] + 1)
            row.append(least)
    return row[-1]
