"""Abilities of this machine's kernel."""

from __future__ import annotations

import platform
import re

__all__ = ["tells_how_processes_end"]


def tells_how_processes_end() -> bool:
    """Whether everybody who holds a pidfd learns the exit code of a process that was collected: Linux 6.15."""
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return found is not None and (int(found[1]), int(found[2])) >= (6, 15)
