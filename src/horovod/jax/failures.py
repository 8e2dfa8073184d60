"""Errors of collectives inside compiled programs, and the memory of those that failed."""

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
    """Let nothing that is in flight touch XLA's memory any more, which XLA takes back when a call of it fails.

    Operations that failed on all ranks have ended. Those that Ctrl-C interrupted go on with copies, for other ranks.

    Args:
        memory: arrays of numpy on it.
    """

    def act() -> None:
        for handle in engine.in_flight():
            arrays = [*handle.inputs, *handle.outputs]
            if any(np.may_share_memory(array, ours) for array in arrays for ours in memory):
                # In place stays in place.
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
    runs or when its results are used. Inside this block, also as a decorator, what a collective raised is raised again
    as what it is, such as ``PeerLostError``; Ctrl-C while it waited is ``KeyboardInterrupt``.

    Raises:
        HorovodInternalError: a collective failed; JAX's error is its ``__cause__``.
        KeyboardInterrupt: it was interrupted.
    """
    with typed((RuntimeError, ValueError)):
        yield
