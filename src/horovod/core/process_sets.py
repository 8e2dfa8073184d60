"""The table of process sets and their ranks; free ids are reused first-in, first-out."""

from __future__ import annotations

import collections
from collections.abc import Sequence

__all__ = ["ProcessSetTable"]


class ProcessSetTable:
    """The table every rank keeps; equal on all ranks because it changes only by log entries.

    Args:
        size: number of ranks in the job; set 0 holds all of them.
    """

    def __init__(self, size: int) -> None:
        self._sets: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self._free: collections.deque[int] = collections.deque()
        self._next = 1
        self._size = size
        self.version = 0  # grows with every change

    def members(self, process_set: int) -> tuple[int, ...]:
        """Return the global ranks of a set, ascending.

        Raises:
            KeyError: the set does not exist.
        """
        return self._sets[process_set]

    def find_members(self, process_set: int) -> tuple[int, ...] | None:
        """Return the global ranks of a set, ascending; None if the set does not exist."""
        return self._sets.get(process_set)

    def as_dict(self) -> dict[int, list[int]]:
        """Return every set's ranks by id."""
        return {key: list(members) for key, members in list(self._sets.items())}

    def __contains__(self, process_set: int) -> bool:
        return process_set in self._sets

    def find(self, ranks: Sequence[int]) -> int | None:
        """Return the id of the set with exactly these ranks, or None."""
        wanted = tuple(sorted(ranks))
        for key, members in list(self._sets.items()):
            if members == wanted:
                return key
        return None

    def check(self, ranks: Sequence[int], key: int = 0) -> str:
        """Return why these ranks cannot become a set, or an empty string.

        ``key`` is the id that the set had in an earlier generation; it may have the members of another set, because
        ranks may have been lost. 0: take any id, and refuse members that another set has.
        """
        if len(ranks) == 0:
            return "a process set needs at least one rank"
        if len(set(ranks)) != len(ranks):
            return f"ranks {list(ranks)} contain a duplicate"
        outside = [rank for rank in ranks if not 0 <= rank < self._size]
        if outside:
            return f"ranks {outside} do not exist in a job of {self._size}"
        if key:
            other = self.find_members(key) or tuple(ranks)
            return "" if other == tuple(ranks) else f"process set {key} has other members, {list(other)}"
        known = self.find(ranks)
        if known is not None:
            return f"ranks {sorted(ranks)} already form process set {known}"
        return ""

    def add(self, ranks: Sequence[int], key: int = 0) -> int:
        """Register a set and return its id; ``check`` must have been passed."""
        if key:
            self.reserve(key)
        elif self._free:
            key = self._free.popleft()
        else:
            key = self._next
            self._next += 1
        self._sets[key] = tuple(sorted(ranks))
        self.version += 1
        return key

    def reserve(self, key: int) -> None:
        """Never give this id to a set: it was that of a set whose ranks are lost, and programs may contain it."""
        self._next = max(self._next, key + 1)

    def remove(self, process_set: int) -> None:
        """Forget a set; its id becomes free."""
        del self._sets[process_set]
        self._free.append(process_set)
        self.version += 1
