"""Names for users: a binding that makes up names of operations explains them here."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Label", "in_words", "register"]

Label = Callable[[str, int], str]
"""Returns the text for users, given an operation's name and how often a rank has submitted it, the last time included;
0 if the latter is not known."""

_labels: dict[str, Label] = {}


def register(prefix: str, label: Label) -> None:
    """Register the explanation of names that begin with ``prefix``; call this once per process.

    Args:
        prefix: the beginning of names as they were given to ``allreduce`` and the others.
        label: called when an error is made, at any time and on any thread; an empty text says nothing.
    """
    _labels[prefix] = label


def in_words(name: str, times: int) -> str:
    """Return the user's term for an operation, or an empty text.

    Args:
        name: as it was given to ``allreduce`` and the others.
        times: how often the rank in question has submitted it; 0 if that is not known.
    """
    for prefix, label in _labels.items():
        if name.startswith(prefix) and (words := label(name, times)):
            return words
    return ""
