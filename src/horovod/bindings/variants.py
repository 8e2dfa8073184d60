"""Variants of a collective (in place, asynchronous, grouped), derived from the function that describes its call.

The description takes the arguments of the plain form, first the tensor, and returns a ``Call``. Type checkers see
the parameters of the variants through ``ParamSpec``; for grouped variants, all but the name of the first one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from horovod.engine.calls import Call

__all__ = ["asynchronous", "derive", "grouped", "synchronous"]

P = ParamSpec("P")
R = TypeVar("R")
#: A function with ``self`` before the parameters ``P``.
Method = Callable[Concatenate[Any, P], R]


def synchronous(describe: Callable[P, Call], in_place: bool = False) -> Method[P, Any]:
    """Return the method that runs the collective on one tensor and waits for the result."""

    name = next(iter(inspect.signature(describe).parameters))

    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        # Skip the wrapper of ``derive``: for a small operation it costs as much as the description.
        if not args and name in kwargs:
            args = (kwargs.pop(name),)
        return self._run_one(describe(*args, **kwargs), args[0], in_place)

    return _label(method, describe, in_place=in_place, is_method=True)


def asynchronous(describe: Callable[P, Call], in_place: bool = False) -> Method[P, int]:
    """Return the method that starts the collective on one tensor and returns a handle for ``synchronize``."""

    def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> int:
        handle: int = self._start(describe(*args, **kwargs), args[:1], in_place)
        return handle

    return derive(method, describe, begins=True, in_place=in_place, is_method=True)


def grouped(
    describe: Callable[Concatenate[Any, P], Call], in_place: bool = False
) -> tuple[Callable[Concatenate[Any, Any, P], list[Any]], Callable[Concatenate[Any, Any, P], int]]:
    """Return two methods that run several tensors as one operation: a blocking one and an asynchronous one."""

    def run(self: Any, tensors: Any, /, *args: P.args, **kwargs: P.kwargs) -> list[Any]:
        results: list[Any] = self._run(describe(tensors, *args, **kwargs), _some(tensors), in_place)
        return results

    def start(self: Any, tensors: Any, /, *args: P.args, **kwargs: P.kwargs) -> int:
        handle: int = self._start(describe(tensors, *args, **kwargs), _some(tensors), in_place, many=True)
        return handle

    return (
        derive(run, describe, in_place=in_place, is_grouped=True, is_method=True),
        derive(start, describe, begins=True, in_place=in_place, is_grouped=True, is_method=True),
    )


def derive(
    function: Callable[P, R], plain: Callable[..., Any], *, begins: bool = False, in_place: bool = False,
    is_grouped: bool = False, is_method: bool = False,
) -> Callable[P, R]:  # fmt: skip
    """Return a variant with name, signature and docstring derived from the plain form.

    Args:
        function: the variant; its first argument is the tensor or tensors, which callers may also pass by name.
        plain: the plain form, source of the parameters and the docstring.
        begins: whether the variant returns a handle.
        in_place: whether it writes its results to the tensors.
        is_grouped: whether it takes several tensors.
        is_method: whether it takes ``self`` first.
    """
    first = next(iter(inspect.signature(plain).parameters))
    key = f"{first}s" if is_grouped else first

    def variant(*args: Any, **kwargs: Any) -> R:
        if key in kwargs and len(args) == is_method:
            args = (*args, kwargs.pop(key))
        return function(*args, **kwargs)

    labelled = _label(variant, plain, begins=begins, in_place=in_place, is_grouped=is_grouped, is_method=is_method)
    function.__qualname__ = variant.__name__
    return labelled


def _label(
    variant: Callable[..., R], plain: Callable[P, Any], *, begins: bool = False, in_place: bool = False,
    is_grouped: bool = False, is_method: bool = False,
) -> Callable[..., R]:  # fmt: skip
    """Give a variant its name, signature and docstring; see ``derive``."""
    name = plain.__qualname__ = plain.__name__.lstrip("_")  # Python's errors about arguments say ``allreduce()``
    first, *others = inspect.signature(plain).parameters.values()
    before = [inspect.Parameter("self", first.kind)] if is_method else []
    variant.__name__ = f"{'grouped_' * is_grouped}{name}{'_async' * begins}{'_' * in_place}"
    variant.__qualname__ = f"{'Collectives.' * is_method}{variant.__name__}"  # importable path, for the docs
    variant.__module__ = plain.__module__
    variant.__doc__ = plain.__doc__
    if begins or in_place or is_grouped:
        what = "several tensors as one operation" if is_grouped else "a tensor"
        how = f"{', in place' * in_place}{', for ``synchronize``' * begins}"
        variant.__doc__ = f"{'Start' if begins else 'Run'} {name} of {what}{how}. See ``{name}``."
    key = f"{first.name}s" if is_grouped else first.name
    signature = inspect.Signature([*before, first.replace(name=key), *others])
    variant.__signature__ = signature  # type: ignore[attr-defined]
    return variant


def _some(tensors: Sequence[Any]) -> Sequence[Any]:
    if not len(tensors):
        raise ValueError("a grouped operation needs at least one tensor. Received an empty list")
    return tensors
