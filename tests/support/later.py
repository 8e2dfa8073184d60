"""Modules that only ranks load, so that the process of the tests starts without frameworks."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["later"]


class _Later:
    """In place of a module; a rank gets the module itself, since it is pickled as that."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self._name,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            # pytest looks at every name of a test's module for marks and fixtures; that must not load a framework.
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def later(name: str) -> Any:
    """Return what stands for a module until a rank uses it."""
    return _Later(name)
