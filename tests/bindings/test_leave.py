"""Functions of ``hvd.on_leave`` in jobs that are not elastic."""

from __future__ import annotations

import signal
import sys

import horovod.numpy as hvd


def test_sigterm_reaches_the_handler_of_the_script_after_the_functions() -> None:
    done: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: done.append("own"))
    try:
        hvd.on_leave(lambda: done.append("function"))
        hvd.on_leave(lambda: sys.exit(1))  # ends neither the other functions nor the handler
        signal.raise_signal(signal.SIGTERM)
        assert done == ["function", "own"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_worker_that_sigterm_ends_too_does_not_disturb_the_functions() -> None:
    """PyTorch's DataLoader raises in its handler for it, as soon as SIGTERM has come to all processes of a rank."""
    done: list[str] = []

    def fail(number: int, frame: object) -> None:
        raise RuntimeError("DataLoader worker is killed by signal: Terminated.")

    before = (
        signal.signal(signal.SIGTERM, lambda number, frame: done.append("own")),
        signal.signal(signal.SIGCHLD, fail),
    )
    try:

        @hvd.on_leave
        def function() -> None:
            signal.raise_signal(signal.SIGCHLD)
            done.append("function")

        signal.raise_signal(signal.SIGTERM)
        assert done == ["function", "own"]
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGCHLD, before[1])
