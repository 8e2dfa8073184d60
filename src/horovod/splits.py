"""Near-even splitting: lengths differ by one at most, and the longer parts come first."""

from __future__ import annotations

__all__ = ["part_of", "split_evenly"]


def part_of(count: int, parts: int, index: int) -> tuple[int, int]:
    """Return where the ``index``-th of ``parts`` parts of ``range(count)`` starts and stops."""
    each, longer = divmod(count, parts)
    start = index * each + min(index, longer)
    return start, start + each + (index < longer)


def split_evenly(count: int, parts: int) -> list[range]:
    """Split ``range(count)`` into at most ``parts`` runs, none of them empty."""
    return [range(*part_of(count, parts, index)) for index in range(min(parts, count))]
