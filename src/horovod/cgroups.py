"""Limits of control groups: the number of cores, and whether memory sufficed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["oom_kills", "usable_cores"]


def usable_cores(pids: Sequence[int] = (0,), root: Path = Path("/")) -> int:
    """Return how many cores processes may use together: their affinities, limited by this one's control groups.

    Returns:
        At least 1.
    """
    affinity: set[int] = set()
    for pid in pids:
        # Other code notices a process that has ended already.
        with contextlib.suppress(ProcessLookupError):
            affinity |= os.sched_getaffinity(pid)
    cores = float(len(affinity))
    for folder in _control_groups(root, "cpu"):
        quota, period = _cpu_quota(folder)
        if quota > 0 and period > 0:
            cores = min(cores, quota / period)
    return max(1, round(cores))


def _cpu_quota(folder: Path) -> tuple[int, int]:
    """Return microseconds of processor time, and of a period; a quota of 0 means no limit."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return (0 if quota == "max" else int(quota)), int(period)
    except (OSError, ValueError):
        pass
    try:
        return int((folder / "cpu.cfs_quota_us").read_text()), int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return 0, 0


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed for lack of memory, in our control group or else this machine.

    Only the difference between two calls has a meaning; -1 if the kernel does not count.
    """
    for folder in _control_groups(root, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            count = _counter(folder / name)
            if count is not None:
                return count
    count = _counter(root / "proc/vmstat")
    return -1 if count is None else count


def _counter(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of our control group and of its parents, nearest first, for either version of the interface."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        mounts = [f"sys/fs/cgroup/{names}", f"sys/fs/cgroup/{controller}"] if names else ["sys/fs/cgroup"]
        mount = next((root / m for m in mounts if (root / m).is_dir()), None)
        if mount is None:
            continue
        # In a container the path may be the host's, while the mount shows only our part of the tree.
        folder = mount / path.lstrip("/")
        while folder != mount and mount in folder.parents:
            if folder.is_dir():
                yield folder
            folder = folder.parent
        yield mount
