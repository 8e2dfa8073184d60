"""What the kernel of this machine can do."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest

__all__ = ["needs_sleepers", "tells_how_processes_end", "tells_what_threads_sleep_in"]


def tells_how_processes_end() -> bool:
    """Whether everybody who holds a pidfd learns the exit code of a process that was collected: Linux 6.15."""
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return found is not None and (int(found[1]), int(found[2])) >= (6, 15)


def tells_what_threads_sleep_in() -> bool:
    """Whether this machine's kernel says what a thread sleeps in; gVisor's does not, and then nothing is proven."""
    try:
        return bool(Path("/proc/self/syscall").read_text())
    except OSError:
        return False


needs_sleepers = pytest.mark.skipif(
    not tells_what_threads_sleep_in(), reason="needs a kernel that says what a thread sleeps in, by /proc/self/syscall"
)
