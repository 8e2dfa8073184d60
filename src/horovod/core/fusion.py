"""Group neighbouring log entries that are executed as one.

Only neighbours fuse, so the order of the log stays the order of readiness. The transport decides which may fuse.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

__all__ = ["MAX_FUSED", "plan"]

MAX_FUSED = 256


def plan(entries: Iterable[tuple[int, Hashable | None, int]], threshold_bytes: int) -> list[list[int]]:
    """Group neighbouring entries.

    Args:
        entries: (id, key, bytes) in log order; entries fuse when their keys are equal and not None.
        threshold_bytes: maximum bytes of a group of several entries; 0 switches fusion off.

    Returns:
        The ids, in the same order, in groups of one or more.
    """
    groups: list[list[int]] = []
    last_key: Hashable | None = None
    total = 0
    for entry, key, nbytes in entries:
        fits = key is not None and key == last_key and total + nbytes <= threshold_bytes
        if fits and len(groups[-1]) < MAX_FUSED:
            groups[-1].append(entry)
            total += nbytes
        else:
            groups.append([entry])
            last_key, total = key, nbytes
    return groups
