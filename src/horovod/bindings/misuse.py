"""Errors and warnings about wrong use: the action, the user's line, the rank, and the remedy."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

from horovod import context
from horovod.engine import callsite
from horovod.errors import OptimizerUseError, RequestError

__all__ = [
    "changed_gradient",
    "check_decorated",
    "find_open",
    "is_integer",
    "not_installed",
    "out_of_turn",
    "runs_when_called",
    "type_name",
    "warn_deprecated",
    "without_class_names",
    "wrong_argument",
]

T = TypeVar("T")


def is_integer(value: Any) -> bool:
    """Whether an argument is an integer of Python, of numpy or of a framework, and no truth value."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def type_name(value: Any) -> str:
    """Return the name of an argument's type; a class that the caller did not call is told apart from its objects."""
    return f"{value.__name__}, not called" if callable(value) and hasattr(value, "__name__") else type(value).__name__


def runs_when_called(value: Any) -> bool:
    """Whether a call runs the body of ``value``: that of an async function or a generator runs later, or never."""
    later = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    return callable(value) and not any(is_such(value) for is_such in later)


def check_decorated(function: Any, wanted: str) -> None:
    """Refuse an object that a decorator cannot take.

    Args:
        function: the object; a call of it must run its body.
        wanted: which decorator takes what, as the beginning of the error.

    Raises:
        RequestError: it is not callable, async, or a generator.
    """
    if not runs_when_called(function):
        found = getattr(function, "__name__", type_name(function))
        raise wrong_argument(f"{wanted}, which must not be async or have a yield. Received: {found}")


def wrong_argument(text: str) -> RequestError:
    """Return the error for an invalid argument, with the caller's line added."""
    place = callsite.here()
    return RequestError(f"{text} ({place})" if place else text)


def find_open(handles: Mapping[int, T], handle: int) -> T | None:
    """Return the entry of a handle, or None if it is unknown.

    Raises:
        ValueError: ``handle`` is no handle, such as a list of them.
    """
    try:
        return handles.get(handle)
    except TypeError:  # unhashable
        raise wrong_argument(f"expected the handle of one operation. Received: {type_name(handle)}") from None


def out_of_turn(what: str, instead: str) -> OptimizerUseError:
    """Return the error for gradients that were used at the wrong moment, with rank and line, and with the remedy."""
    where = ", ".join(filter(None, (f"rank {context.world().rank}", callsite.here())))
    return OptimizerUseError(f"{what} ({where}). {instead}")


def changed_gradient(name: str, instead: str) -> OptimizerUseError:
    """Return the error for a gradient that the caller changed while it was being reduced."""
    return out_of_turn(f"the gradient of {name} was changed after backward() had handed it to the other ranks", instead)


def warn_deprecated(text: str) -> None:
    """Warn at the user's line, across all our own frames: Python shows the warning if that line is in the script."""
    frame = callsite.user_frame()
    module = frame.f_globals.get("__name__", "")
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, DeprecationWarning, frame.f_code.co_filename, frame.f_lineno, module, registry)


def not_installed(error: ModuleNotFoundError, package: str, extra: str = "") -> ModuleNotFoundError:
    """Return the error to raise when a framework's import failed, with khorovod's pip extra that installs the package
    if there is one; return errors about other packages unchanged.
    """
    if error.name != package:
        return error
    install = f"'khorovod[{extra}]'" if extra else package
    text = f"horovod.{extra or package} needs {package}, which is not installed here: pip install {install}"
    return ModuleNotFoundError(text, name=package)


def without_class_names(cls: type[T]) -> type[T]:
    """Let Python's errors about arguments name ``rank()`` instead of ``JobFunctions.rank()``; a decorator."""
    for name, function in vars(cls).items():
        if inspect.isfunction(function):
            function.__qualname__ = name
    return cls
