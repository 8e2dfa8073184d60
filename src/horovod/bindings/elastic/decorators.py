"""``run`` and ``step`` for frameworks that convert our errors into their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from horovod.bindings.elastic.run import run
from horovod.bindings.elastic.step import step

__all__ = ["decorators"]

F = TypeVar("F", bound=Callable[..., Any])


def decorators(
    typed: Callable[[], AbstractContextManager[None]], wait: Callable[[Any], Any] = lambda values: None
) -> tuple[Any, Any]:
    """Return ``run`` and ``step`` of a framework.

    Args:
        typed: returns a context that raises our original error instead of the framework's converted one.
        wait: waits until values are computed, so that an error is raised in the step that caused it.
    """

    def around(decorate: F) -> F:
        @functools.wraps(decorate)
        def decorator(func: Callable[..., Any]) -> Any:
            @functools.wraps(func)
            def call(*args: Any, **kwargs: Any) -> Any:
                with typed():
                    result = func(*args, **kwargs)
                    wait((result, [vars(arg) for arg in args[:1]]))
                    return result

            return decorate(call)

        return decorator  # type: ignore[return-value]

    return around(run), around(step)
