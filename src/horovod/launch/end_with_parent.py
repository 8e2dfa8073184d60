"""Run a program that ends when the launcher does: ``python -I -S end_with_parent.py PARENT PROGRAM ARGS...``.

While the login shell on the other host hangs, an ssh client reads nothing, and would outlive a killed launcher. So the
kernel ends the client. This is a program of its own because code between fork and exec can hang in a process with
threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main(words: list[str]) -> None:
    """Become the program; ``words`` are the parent's process id, the program, and its arguments."""
    parent, program, *_ = words
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() == int(parent):  # else the parent has ended already
        os.execvp(program, words[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
