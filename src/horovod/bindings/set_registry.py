"""Process sets of a job across membership changes: each keeps its id, because compiled programs contain the id."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from horovod.phrases import list_ranks

__all__ = ["KnownSet", "SetRegistry"]


@dataclass(eq=False)
class KnownSet:
    """Description of a process set, the same on all ranks."""

    key: int
    ranks: list[int]  # ascending; empty if all its members are lost
    declaration: int | None = None  # its index among the sets made before the first rendezvous; None for a later set
    why: str = ""  # reason why it can no longer be used, or empty
    # living `ProcessSet` objects of this script for this set. A training function that is called again makes a new
    # object each time.
    objects: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    def describe(self) -> None:
        """Copy this description to the ``ProcessSet`` objects."""
        for process_set in self.objects:
            process_set.process_set_id = self.key if self.ranks else None
            process_set.ranks, process_set._why = list(self.ranks), self.why

    def forget(self) -> None:
        """Mark the ``ProcessSet`` objects as unregistered."""
        for process_set in self.objects:
            process_set.process_set_id = None


class SetRegistry:
    """The process sets that were registered.

    Attributes:
        entries: descriptions of the sets, in the order of their registration.
        have_met: whether the first rendezvous of an elastic job is done, so that ranks can register sets.
    """

    def __init__(self) -> None:
        self.entries: list[KnownSet] = []
        self._carried: list[KnownSet] = []  # sets of an earlier generation, not added again in this one
        self.have_met = self._has_adopted = False

    def declare(self, process_set: Any) -> None:
        """Record a set, to be registered at the first rendezvous."""
        place = sum(entry.declaration is not None for entry in self.entries)
        self.entries.append(KnownSet(len(self.entries) + 1, process_set.ranks, place))
        self.note(self.entries[-1].key, process_set)

    def note(self, key: int, process_set: Any) -> None:
        """Record that an object refers to the set with this id."""
        entry = next((entry for entry in self.entries if entry.key == key), None)
        if entry is None:
            entry = KnownSet(key, process_set.ranks)
            self.entries.append(entry)
        entry.objects.add(process_set)
        entry.describe()

    def takes_again(self, process_set: Any) -> bool:
        """Bind an object to an earlier generation's set with the same ranks, each set only once per generation. Return
        whether there is such a set.
        """
        found = [entry for entry in self._carried if entry.ranks == process_set.ranks]
        if not found:
            return False
        entry = next((entry for entry in found if process_set in entry.objects), found[0])
        self._carried.remove(entry)
        self.note(entry.key, process_set)
        return True

    def remove(self, key: int) -> None:
        """Forget a set."""
        for entry in [entry for entry in self.entries if entry.key == key]:
            entry.forget()
            self.entries.remove(entry)
        self._carried = [entry for entry in self._carried if entry.key != key]

    def clear(self) -> None:
        """Forget all sets and the rendezvous."""
        for entry in self.entries:
            entry.forget()
        self.entries, self._carried = [], []
        self.have_met = self._has_adopted = False

    def renew(
        self, rank: int, previous: Sequence[int], exchange: Callable[[Any], Sequence[Any]],
        register: Callable[[KnownSet], None],
    ) -> None:  # fmt: skip
        """Register all sets again with their surviving members. Collective.

        Sets without a ``ProcessSet`` object on any rank are dropped. Sets made before the first rendezvous stay,
        because the scripts of new ranks make them, too. ``previous`` has for each rank its rank in the previous
        generation, or -1. ``exchange`` gathers one value from each rank; ``register`` registers a set, with its id, on
        all ranks, and keeps the id of a lost set from new ones.
        """
        self.have_met, knows = True, self._has_adopted and previous[rank] >= 0
        if knows:
            self._renumber({old: new for new, old in enumerate(previous) if old >= 0})
        rows = [(e.key, e.ranks, e.declaration, e.why, bool(e.objects)) for e in self.entries]
        everywhere = exchange((knows, rows))
        seen = [rows for has_seen, rows in everywhere if has_seen] or [everywhere[0][1]]
        used = {key for rows in seen for key, *_, is_used in rows if is_used}
        self._adopt([row for row in seen[0] if row[0] in used or row[2] is not None], knows)
        self._has_adopted = True
        for entry in self.entries:
            register(entry)
        self._carried = [entry for entry in self.entries if entry.ranks]

    def _renumber(self, numbers: dict[int, int]) -> None:
        """Replace the ranks of all sets by the new ranks of their surviving members."""
        for entry in self.entries:
            before, entry.ranks = entry.ranks, sorted(numbers[rank] for rank in entry.ranks if rank in numbers)
            if before and not entry.ranks:
                entry.why = f"no rank of the process set of {list_ranks(before)} is left: the job has lost them"

    def _adopt(self, rows: Sequence[Any], knows: bool) -> None:
        """Replace this rank's sets by the other ranks' sets."""
        # A new rank declared the same sets in the same order as the others, but their ids may differ.
        old, self.entries = self.entries, []
        own = {e.key if knows else e.declaration: e for e in old if knows or e.declaration is not None}
        for key, ranks, declaration, why, _ in rows:
            entry = own.pop(key if knows else declaration, None) or KnownSet(key, ranks)
            entry.key, entry.ranks, entry.declaration, entry.why = key, ranks, declaration, why
            entry.describe()
            self.entries.append(entry)
        for entry in old:
            if entry not in self.entries:
                entry.forget()
