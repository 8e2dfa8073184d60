"""Runs a program that ends when the launcher does, however that ends: ``python -I -S leash.py PARENT PROGRAM ARGS...``.

An ssh client that talks with nobody yet, because the login shell of the other host hangs, reads nothing and would stay
when the launcher is killed. It is told by the kernel then. Done by a program of its own, since what runs between fork
and exec in a process with threads can hang there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main(words: list[str]) -> None:
    """Become the program; ``words`` are the process that must live, the program, and its arguments."""
    parent, program, *_ = words
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() == int(parent):  # else it has ended before
        os.execvp(program, words[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
