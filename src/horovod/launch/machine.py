"""What the launcher must know of this machine: its cores, its names, and whether it ran out of memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

__all__ = ["is_this_host", "oom_kills", "usable_cores"]


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may keep busy: its affinity, and what its control groups allow it.

    Args:
        root: where ``proc`` and ``sys`` are.

    Returns:
        At least 1.
    """
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _control_groups(root, "cpu"):
        quota, period = _cpu_quota(folder)
        if quota > 0 and period > 0:
            cores = min(cores, quota / period)
    return max(1, round(cores))


def _cpu_quota(folder: Path) -> tuple[int, int]:
    """Microseconds of processor time per period; a quota of 0 is no limit."""
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
    """How many processes the kernel has killed for want of memory, in our control group or else on this machine.

    Only the difference between two calls means anything; -1 where the kernel does not say.
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
    """Folders of our control group and those above it, nearest first, for either version of the interface."""
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


def is_this_host(name: str) -> bool:
    """Whether ``name`` is a name or an address of this machine. May ask the name service."""
    own = os.uname().nodename
    if name in ("localhost", own, own.split(".")[0]) or name.startswith("127."):
        return True
    try:
        addresses = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in addresses)


def _can_bind(family: int, address: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]) -> bool:
    """Only an address of this machine can be listened on."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True
