"""Errors of collectives inside compiled programs, and protection of their memory after a failure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from horovod import context
from horovod.bindings.failures import typed
from horovod.bindings.numpy_adapter import NumpyAdapter

__all__ = ["let_go", "typed_errors"]


def let_go(memory: Sequence[Any]) -> None:
    """Detach operations in flight from XLA's memory, which XLA frees when its call fails.

    Operations that failed on all ranks have ended. Those interrupted by Ctrl-C continue on copies, for other ranks.
    """

    def act() -> None:
        for handle in engine.in_flight():
            arrays = [*handle.inputs, *handle.outputs]
            if any(np.may_share_memory(array, ours) for array in arrays for ours in memory):
                # One copy per array, so that an in-place operation stays in place.
                copies = {id(array): np.array(array) for array in arrays}
                handle.allocator = NumpyAdapter()
                handle.inputs = [copies[id(array)] for array in handle.inputs]
                handle.outputs = [copies[id(array)] for array in handle.outputs]

    engine = context.engine()
    if engine.in_flight():
        engine.pause(act)


@contextmanager
def typed_errors() -> Iterator[None]:
    """Raise horovod's own exceptions for collectives that fail inside compiled programs.

    JAX raises ``jax.errors.JaxRuntimeError``, or ``ValueError``, for any error in a program, when the program
    runs or when its results are used. Inside this context (also usable as a decorator) the original error of the
    collective is raised instead, such as ``PeerLostError``, or ``KeyboardInterrupt`` after Ctrl-C while it waited.

    Raises:
        HorovodInternalError: a collective failed; JAX's error is its ``__cause__``.
        KeyboardInterrupt: the user interrupted the collective.
    """
    with typed((RuntimeError, ValueError)):
        yield
