"""Which of the machine's logical CPUs are one core: hyperthreads, which take cycles from each other.

Source: Documentation/admin-guide/cputopology.rst of Linux.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["affinities", "core_of", "physical_cores", "share_cores"]

_LISTS = ("core_cpus_list", "thread_siblings_list")


def affinities(pids: Sequence[int]) -> list[frozenset[int]]:
    """Return the CPUs on which each process may run; none for one that has ended."""
    found = []
    for pid in pids:
        try:
            found.append(frozenset(os.sched_getaffinity(pid)))
        except ProcessLookupError:
            found.append(frozenset())
    return found


def core_of(cpu: int, root: Path = Path("/")) -> int:
    """Return the lowest CPU of the core that a CPU belongs to: itself, where the kernel does not say.

    Args:
        cpu: its number.
        root: where ``sys`` is.
    """
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    for name in _LISTS:
        try:
            siblings = _cpus((folder / name).read_text())
        except (OSError, ValueError):
            continue
        if cpu in siblings:
            return min(siblings)
    return cpu


def physical_cores(cpus: Iterable[int], root: Path = Path("/")) -> int:
    """Return how many cores some CPUs are."""
    return len({core_of(cpu, root) for cpu in cpus})


def share_cores(allowed: Sequence[frozenset[int]], root: Path = Path("/")) -> bool:
    """Whether there is no way to give every rank a core of its own, so that some are hyperthreads of one core.

    Args:
        allowed: the CPUs on which each rank may run; none for one that has ended, and needs none.
        root: where ``sys`` is.
    """
    allowed = [cpus for cpus in allowed if cpus]
    core = {cpu: core_of(cpu, root) for cpus in set(allowed) for cpu in cpus}
    if len(allowed) > len(set(core.values())):
        return True
    # Most jobs bind nobody; then it is enough to count.
    if len(set(allowed)) <= 1:
        return False
    wanted = [sorted({core[cpu] for cpu in cpus}) for cpus in allowed]
    owner: dict[int, int] = {}
    return not all(_settle(rank, wanted, owner, set()) for rank in range(len(wanted)))


def _settle(rank: int, wanted: Sequence[Sequence[int]], owner: dict[int, int], seen: set[int]) -> bool:
    """Give a rank a core, and its owner another one if that helps: a matching by augmenting paths."""
    for core in wanted[rank]:
        if core not in seen:
            seen.add(core)
            if core not in owner or _settle(owner[core], wanted, owner, seen):
                owner[core] = rank
                return True
    return False


def _cpus(text: str) -> set[int]:
    """Return the numbers of a list such as ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
