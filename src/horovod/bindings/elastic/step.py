"""A function that is one step of training: it completes on all ranks, or has no effect."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import numpy as np

from horovod import context
from horovod.bindings.elastic.notifications import notification_manager
from horovod.bindings.elastic.run import run
from horovod.bindings.elastic.state import State
from horovod.bindings.misuse import check_decorated, runs_when_called, wrong_argument
from horovod.bindings.runtime import comm
from horovod.errors import HorovodInternalError, HostsUpdatedInterrupt, PeerLostError
from horovod.logs import logger

__all__ = ["decorators", "step"]

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


def step(function: Callable[P, R]) -> Callable[P, R]:
    """Declare a function to be one step of training; a lost rank does not undo completed steps.

    If a rank dies during a step, the step has no effect on the others. ``hvd.elastic.run`` renews the membership and
    calls the training function again, which repeats the same step: no commit is needed. New ranks are admitted
    between two steps.

    The function must change parameters only after its last collective, as one ``optimizer.step()`` does.

    Args:
        function: its first argument is the state; all ranks call it inside a function of ``hvd.elastic.run``.

    Returns:
        The function, with the same arguments and result. It also raises HostsUpdatedInterrupt, before its first line,
        when the membership is to change; ``run`` handles that.
    """
    check_decorated(function, "hvd.elastic.step takes a function")
    name = getattr(function, "__name__", "the function")
    State._has_declared_steps = True

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        state = _state_of(name, args)
        if not context.is_initialized() or not context.is_elastic():
            result = function(*args, **kwargs)
            _complete(state)
            return result
        if state._is_in_step:
            raise wrong_argument(f"{name}() is called within another step; one step contains all of a batch")
        if state._change_is_due:
            raise HostsUpdatedInterrupt()
        state._keeps_steps = state._can_keep_steps()
        state.capture()
        state._is_in_step = True
        try:
            # Rank 0 tells during the step whether the membership is to change, so that no rank waits for it. The
            # script may call the step again after its own exception, on this rank alone: then that was asked.
            if state._asked is None:
                wants = np.array([context.wants_change()], np.uint8)
                state._asked = comm.broadcast_async(wants, 0, name="elastic.change")
            result = function(*args, **kwargs)
        except HorovodInternalError:
            if not state.undo():
                logger.warning(
                    "a step failed after it had changed parameters, so that it cannot be undone; going back to the "
                    "last commit. Use one optimizer.step() in each step, as its last collective"
                )
                state._keeps_steps = False
            raise
        finally:
            state._is_in_step = False
        asked, state._asked = state._asked, None
        _complete(state)
        # This rank's step is complete. If a rank dies now, the next collective raises PeerLostError.
        with contextlib.suppress(PeerLostError):
            state._change_is_due = bool(comm.synchronize(asked)[0])
        return result

    return wrapper


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

            return decorate(call if runs_when_called(func) else func)  # which refuses others

        return decorator  # type: ignore[return-value]

    return around(run), around(step)


def _state_of(name: str, args: tuple[Any, ...]) -> State:
    if not args or not isinstance(args[0], State):
        received = type(args[0]).__name__ if args else "no argument"
        raise TypeError(
            f"{name}() is a step of hvd.elastic.step and takes a state as its first argument. Received: {received}"
        )
    states = [each for each in notification_manager.listeners if isinstance(each, State)]
    if states and not any(each is args[0] for each in states):
        raise wrong_argument(
            f"{name}() has got another state than the function of hvd.elastic.run around it, which keeps its own state "
            "alone the same on all ranks. Put the values of both into that one"
        )
    return args[0]


def _complete(state: State) -> None:
    state.progress += 1
    state.confirm()
