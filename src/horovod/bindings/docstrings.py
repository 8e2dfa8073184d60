"""Docstrings of functions that several frameworks share: common parts are written once."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["explained_like"]

F = TypeVar("F", bound=Callable[..., Any])

#: Parameters that only some frameworks have, always with the same meaning.
_PARAMETERS = {
    "compression": "how to send it, such as ``Compression.fp16``.",
    "device_dense": "accepted; tensors travel through host memory.",
    "device_sparse": "accepted.",
    "ignore_name_scope": "in a graph, leave the name scopes out of the key.",
}
_ENTRY = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)
_ORDER = ("", "Args", "Returns", "Raises", "Blocks")


def explained_like(other: Callable[..., Any], **parameters: str) -> Callable[[F], F]:
    """Return a decorator that completes a docstring with that of another function.

    ``Args`` are generated for all parameters; ``Raises`` and ``Blocks`` are copied if the docstring has none.

    Args:
        other: explains parameters and errors that both functions have.
        **parameters: explanations of parameters that differ, or that ``other`` does not have.
    """

    def complete(function: F) -> F:
        if function.__doc__ and other.__doc__:  # python -OO has removed them
            sections = {**_sections(other.__doc__), "": "", "Returns": "", **_sections(function.__doc__)}
            known = {**_PARAMETERS, **dict(_ENTRY.findall(_sections(other.__doc__).get("Args", ""))), **parameters}
            names = [name for name in inspect.signature(function).parameters if name != "self"]
            sections["Args"] = "\n".join(["Args:", *(f"    {name}: {known[name]}" for name in names)])
            function.__doc__ = "\n\n".join(sections[title] for title in _ORDER if sections.get(title))
        return function

    return complete


def _sections(docstring: str) -> dict[str, str]:
    """Return the sections of a docstring by their titles; the text before them has an empty title."""
    found: dict[str, str] = {}
    for part in inspect.cleandoc(docstring).split("\n\n"):
        title = re.match(r"(Args|Returns|Raises):\n|(Blocks)\b", part)
        key = (title[1] or title[2]) if title else ""
        found[key] = f"{found[key]}\n\n{part}" if key in found else part
    return found
