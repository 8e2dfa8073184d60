"""What operations mean to the user: a binding that makes up names of its own says what stands behind them."""

from __future__ import annotations

from collections.abc import Callable

from horovod.core.mismatch import describe_waiting
from horovod.core.requests import Request

__all__ = ["Label", "describe", "register"]

Label = Callable[[str, int], str]
"""Makes a user's words of the name of an operation, and of how often this rank has submitted it, this time included."""

_labels: dict[str, Label] = {}


def register(prefix: str, label: Label) -> None:
    """Let names that begin with ``prefix`` be explained, once in a process.

    Args:
        prefix: of names as they were given to ``allreduce`` and the others.
        label: called when an error is made, at any time and on any thread; an empty text says nothing.
    """
    _labels[prefix] = label


def describe(request: Request, times: int) -> str:
    """Return a request in the user's words, if its name has any, and by kind, name and line.

    Args:
        request: what was submitted.
        times: how often this rank has done so.
    """
    name = request.name.partition(".")[2]
    what = describe_waiting(request)
    for prefix, label in _labels.items():
        if name.startswith(prefix) and (words := label(name, times)):
            return f"{words}: {what}"
    return what
