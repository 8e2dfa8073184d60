"""Which tests are slow: those that are marked so, and those that start processes, found by what they call."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

__all__ = ["mark_what_starts_processes"]

#: Modules all of whose uses start processes: of tests, of Python, of ours.
_STARTERS = {"harness", "elastic_job", "multiprocessing", "subprocess", "horovod.launch.run"}


def mark_what_starts_processes(items: list[pytest.Item]) -> None:
    """Mark as slow each test that starts processes, unless it is marked ``quick``."""
    known: dict[int, bool] = {}
    for item in items:
        if isinstance(item, pytest.Function) and not item.get_closest_marker("quick"):
            fixtures = [definitions[-1].func for definitions in item._fixtureinfo.name2fixturedefs.values()]
            if any(_starts(function, known) for function in (item.obj, *fixtures)):
                item.add_marker(pytest.mark.slow)


def _starts(thing: Any, known: dict[int, bool]) -> bool:
    """Whether a module, function or class of the tests starts processes, by itself or through others of the tests.

    Args:
        thing: what a name in a test stands for.
        known: the answers so far, by ``id``.
    """
    if (thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)) in _STARTERS:
        return True
    if isinstance(thing, type):
        return any(_starts(part, known) for part in vars(thing).values() if isinstance(part, FunctionType))
    thing = inspect.unwrap(thing) if callable(thing) else thing
    if not isinstance(thing, FunctionType) or "/tests/" not in thing.__code__.co_filename:
        return False
    if id(thing) not in known:
        known[id(thing)] = False  # while it is looked at: it may call itself
        names = set(_names(thing.__code__))
        used = [thing.__globals__[name] for name in names if name in thing.__globals__]
        used += [getattr(one, "run", None) for one in used if isinstance(one, ModuleType) and "run" in names]
        known[id(thing)] = (
            {"os", "fork"} <= names or bool(names & _STARTERS) or any(_starts(one, known) for one in used)
        )
    return known[id(thing)]


def _names(code: CodeType) -> Iterator[str]:
    """The global names and attributes in a function and in those inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
