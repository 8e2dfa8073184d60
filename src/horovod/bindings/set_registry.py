"""The process sets of a job, through changes of its members: each keeps its number, which compiled programs hold."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from horovod.phrases import list_ranks

__all__ = ["KnownSet", "SetRegistry"]


@dataclass(eq=False)
class KnownSet:
    """A process set as all ranks know it.

    Attributes:
        key: its number.
        ranks: ascending; none where all its members are lost.
        declaration: its place among the sets that were made before the ranks had met; None for a later one.
        why: why it cannot be used any more, or empty.
        objects: ``ProcessSet`` objects of this script that stand for it, as long as they live. A training function
            that is called again makes another one each time.
    """

    key: int
    ranks: list[int]
    declaration: int | None = None
    why: str = ""
    objects: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    def describe(self) -> None:
        """Let the objects say what is known here."""
        for process_set in self.objects:
            process_set.process_set_id = self.key if self.ranks else None
            process_set.ranks, process_set._why = list(self.ranks), self.why

    def forget(self) -> None:
        """Let the objects stand for no set."""
        for process_set in self.objects:
            process_set.process_set_id = None


class SetRegistry:
    """The process sets that were registered.

    Attributes:
        entries: in the order of their registration.
        have_met: whether the ranks of an elastic job have met, so that sets can be registered with them.
    """

    def __init__(self) -> None:
        self.entries: list[KnownSet] = []
        self._carried: list[KnownSet] = []  # of an earlier generation, not added again in this one
        self.have_met = self._has_adopted = False

    def declare(self, process_set: Any) -> None:
        """Note a set that is registered when the ranks meet."""
        place = sum(entry.declaration is not None for entry in self.entries)
        self.entries.append(KnownSet(len(self.entries) + 1, process_set.ranks, place))
        self.note(self.entries[-1].key, process_set)

    def note(self, key: int, process_set: Any) -> None:
        """Note that an object stands for the set of a number."""
        entry = next((entry for entry in self.entries if entry.key == key), None)
        if entry is None:
            entry = KnownSet(key, process_set.ranks)
            self.entries.append(entry)
        entry.objects.add(process_set)
        entry.describe()

    def takes_again(self, process_set: Any) -> bool:
        """Let an object stand for a set of an earlier generation with the same ranks, once in a generation.

        Returns:
            Whether there is one.
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
        """Forget all sets, and that the ranks have met."""
        for entry in self.entries:
            entry.forget()
        self.entries, self._carried = [], []
        self.have_met = self._has_adopted = False

    def renew(
        self, rank: int, previous: Sequence[int], exchange: Callable[[Any], Sequence[Any]],
        register: Callable[[KnownSet], None],
    ) -> None:  # fmt: skip
        """Register all sets anew, with those of their members that are left. Collective.

        Sets for which no script has an object any more are left out; those that were made before the first meeting
        stay, since the scripts of new ranks make them, too.

        Args:
            rank: of this process.
            previous: by rank, its rank in the generation before; -1 for those that are new.
            exchange: returns what each rank has passed.
            register: registers one with the other ranks, with its number.
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
            if entry.ranks:
                register(entry)
        self._carried = [entry for entry in self.entries if entry.ranks]

    def _renumber(self, numbers: dict[int, int]) -> None:
        """Give all sets the new numbers of those of their ranks that are left."""
        for entry in self.entries:
            before, entry.ranks = entry.ranks, sorted(numbers[rank] for rank in entry.ranks if rank in numbers)
            if before and not entry.ranks:
                entry.why = f"no rank of the process set of {list_ranks(before)} is left: the job has lost them"

    def _adopt(self, rows: Sequence[Any], knows: bool) -> None:
        """Make the sets of this rank those that the others have."""
        # A new rank has declared the same sets as the others in the same order, and perhaps with other numbers.
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
