"""Forked children of a test."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

__all__ = ["in_child"]


def in_child(do: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> bool:
    """Run ``do`` in a forked child, and ``meanwhile`` in the parent; return whether ``do`` returned True."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of a fork with threads
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if do() else 2
        finally:
            os._exit(code)
    meanwhile()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
