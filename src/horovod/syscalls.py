"""System calls that ``os`` lacks in a Python built for older systems, as those of uv and conda are.

Source: memfd_create(2), pidfd_open(2), pidfd_send_signal(2).
"""

from __future__ import annotations

import ctypes
import errno
import os

__all__ = ["memory_file", "open_process", "send_signal"]

_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}
_CLOSE_ON_EXEC = 1
# These numbers are the same on all machines.
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434

_libc = ctypes.CDLL(None, use_errno=True)


def memory_file(name: str) -> int:
    """Return a descriptor of a new file in memory, which no child inherits.

    Raises:
        OSError: the system refuses.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    return _call(_MEMFD_CREATE[os.uname().machine], name.encode(), _CLOSE_ON_EXEC)


def open_process(pid: int) -> int:
    """Return a descriptor that stands for a process and can be read from when the process has ended.

    Raises:
        ProcessLookupError: there is no such process.
        OSError: the system refuses.
    """
    try:
        return _call(_PIDFD_OPEN, pid, 0)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
        raise OSError(
            error.errno,
            "the system refuses pidfd_open(); use Linux 5.3 or newer, and a container runtime that allows this call, "
            "such as Docker 20.10",
        ) from None


def send_signal(fd: int, number: int) -> None:
    """Send a signal to the process that ``fd`` stands for.

    Raises:
        OSError: the system refuses.
    """
    _call(_PIDFD_SEND_SIGNAL, fd, number, None, 0)


def _call(number: int, *arguments: bytes | int | None) -> int:
    result = int(_libc.syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
