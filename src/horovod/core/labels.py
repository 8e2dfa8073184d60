"""Texts for users: names of operations that a binding has made up, and errors about ranks that have left."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["LEFT", "Label", "in_words", "register", "waited_in_vain"]

Label = Callable[[str, int], str]
"""Returns the text for users, given an operation's name and how often a rank has submitted it, the last time included;
0 if the latter is not known."""

_labels: dict[str, Label] = {}


def register(prefix: str, label: Label) -> None:
    """Register the explanation of names that begin with ``prefix``, as users gave them; call this once per process.

    ``label`` is called when an error is made, at any time and on any thread; an empty text says nothing.
    """
    _labels[prefix] = label


def in_words(name: str, times: int) -> str:
    """Return the user's term for an operation, or an empty text. ``times`` is how often the rank in question has
    submitted it; 0 if that is not known.
    """
    for prefix, label in _labels.items():
        if name.startswith(prefix) and (words := label(name, times)):
            return words
    return ""


LEFT = "has left the job"
"""The text about a rank that left without failing."""
_REMEDY = (
    "Look for a collective that only some ranks call, as inside `if hvd.rank() == 0:`, and call it on all ranks; or "
    "for a rank that ends early, as by sys.exit(). If the ranks have different amounts of data, call hvd.join() after "
    "the loop, or in PyTorch loop inside `with hvd.uneven_inputs():`."
)


def waited_in_vain(reason: str, rank: int, what: str) -> str:
    """Return the error text for a rank that waited for another rank that has left; ``what`` is empty if it waited in no
    particular operation.
    """
    text = f"{reason.removesuffix('.')}, while rank {rank} waited in {what}" if what else reason
    return f"{text}.\n{_REMEDY}" if LEFT in reason else text
