"""What a job leaves behind when guard and keeper are killed in the same moment: its launcher inherits it, and ends it.

The kernel hands processes that lose their parent to the nearest *subreaper* above them. A process that is nothing but
a launcher is one, too; then whatever runs below it, other than what it has started itself, belongs to the job, be it
without session and environment. ``horovod.run`` is a guest in a process that may have children of its own, which
nobody could tell from these: there it stays with what carries the job's name.
"""

from __future__ import annotations

import ctypes
import os

from horovod.launch.keeper import descendants

__all__ = ["adopt", "keep", "orphans"]

_PR_SET_CHILD_SUBREAPER = 36
_own: set[int] = set()
_adopts = False


def adopt() -> None:
    """Inherit what is orphaned below this process from now on; only where this process is nothing but a launcher."""
    global _adopts
    _adopts = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def keep(pid: int) -> None:
    """Note a child that the launcher needs for something else than ranks of this host."""
    _own.add(pid)


def orphans() -> list[int]:
    """Return what was inherited, and all below it; to be asked when guard and keeper are gone."""
    if not _adopts:
        return []
    spared = _own.union(*map(descendants, _own))
    return [pid for pid in descendants(os.getpid()) if pid not in spared]
