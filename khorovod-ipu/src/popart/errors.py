"""Exceptions, under PopART's names."""

from __future__ import annotations

from collections.abc import Iterable

from khorovod_ipu.names import nearest

__all__ = ["OutOfMemoryException", "popart_exception", "unknown"]


class popart_exception(RuntimeError):
    """A model cannot be built or run; the message names the received value and the remedy."""


class OutOfMemoryException(popart_exception):
    """The device has not enough memory; the software device never raises it, but scripts may catch it."""


def unknown(what: str, word: str, known: Iterable[str]) -> popart_exception:
    """Return the error for an unknown name.

    Args:
        what: kind of the named object, such as ``a tensor of the graph``.
        word: the received name.
        known: the existing names.
    """
    names = sorted(known)
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    hint = nearest(word, names) or "."
    return popart_exception(f"{word!r} is not {what}{hint} There is: {shown or 'nothing'}")
