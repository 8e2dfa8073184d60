"""Results in the arena: every rank of the host can write its part of them, with no copy in between.

To the user they are ordinary tensors. So a forked child must have what was in them, whatever its parent does to them
later, as of any memory; of shared memory it would not. Hence before a fork what has been lent is detached: it becomes
memory of this process alone, in the same place, and is shared again when its tensor is gone.
"""

from __future__ import annotations

import bisect
import os
import threading
import weakref

from horovod.transports.results import Block, Region, ResultPool, private_region
from horovod.transports.shm.arena import HEAP_START, Arena
from horovod.transports.shm.flags import Flags
from horovod.transports.shm.mapping import attach, detach, populate

__all__ = ["Lending"]

#: The user's own tensors of the arena find room in the rest.
_MOST_OF_ARENA = 0.5
#: An operation ends sooner, unless another rank stands still.
_PATIENCE_S = 2.0


class _ArenaRegion(Region):
    """Memory of a block that lies in the arena."""

    __slots__ = ("_lending", "_nbytes", "_was_detached")

    def __init__(self, lending: Lending, offset: int, nbytes: int) -> None:
        super().__init__(lending.arena.memory, offset, offset)
        self._lending = lending
        self._nbytes = nbytes
        self._was_detached = False

    def detach(self) -> None:
        """Make it this process's own."""
        if not self._was_detached:
            self._was_detached = True
            detach(self.memory, self.start, self._nbytes)

    def recover(self) -> bool:
        """Share it again."""
        if self._was_detached and not attach(self.memory, self.start, self._nbytes):
            return False
        self._was_detached = False
        return True

    def release(self) -> None:
        """Give it back to the arena."""
        self._lending.forget(self.start)
        self._lending.arena.give(self.start, self._nbytes)


class Lending:
    """Lends memory of this rank's arena to results.

    Args:
        arena: this rank's.
        flags: how far everybody is.

    Attributes:
        arena: this rank's.
        pool: what lends.
        busy: held while an operation may write to tensors, whosesoever.
    """

    def __init__(self, arena: Arena, flags: Flags) -> None:
        self.arena = arena
        self._flags = flags
        self.busy = threading.Lock()
        self._ranges: dict[int, int] = {}
        # Of all ranges, in order: looked at by other threads, and so only ever replaced as a whole.
        self._bounds: tuple[list[int], list[int]] = ([], [])
        self._most = int(_MOST_OF_ARENA * (arena.nbytes - HEAP_START))
        self._owner = os.getpid()
        self.pool = ResultPool(make=self._region)
        arena.reclaim, arena.is_lent = self.pool.shrink, self._is_lent
        _open.add(self)

    def close(self) -> None:
        """Lend nothing any more; what is lent stays where it is until its tensor is gone."""
        self.pool.close()
        self.arena.reclaim = lambda: None
        self.arena.is_lent = lambda offset: False

    def before_fork(self) -> None:
        """Make what users have this process's own."""
        if os.getpid() != self._owner:
            return
        # What an operation writes meanwhile would be lost.
        is_quiet = self.busy.acquire(timeout=_PATIENCE_S)
        try:
            self.pool.visit(self._detach)
        finally:
            if is_quiet:
                self.busy.release()

    def forget(self, offset: int) -> None:
        """Note that a block is no more."""
        del self._ranges[offset]
        self._sort()

    def _sort(self) -> None:
        starts = sorted(self._ranges)
        self._bounds = starts, [start + self._ranges[start] for start in starts]

    def _is_lent(self, offset: int) -> bool:
        starts, ends = self._bounds
        index = bisect.bisect_right(starts, offset)
        return index > 0 and offset < ends[index - 1]

    def _detach(self, block: Block) -> None:
        # What others may still write to is no user's yet.
        if isinstance(block.region, _ArenaRegion) and (
            not block.writers or self._flags.reached(block.writers, block.fence)
        ):
            block.region.detach()

    def _region(self, nbytes: int) -> Region | None:
        if sum(self._ranges.values()) + nbytes > self._most:
            return private_region(nbytes)
        try:
            offset = self.arena.take(nbytes)
        except MemoryError:
            return private_region(nbytes)
        self._ranges[offset] = nbytes
        self._sort()
        populate(self.arena.base + offset, nbytes)
        return _ArenaRegion(self, offset, nbytes)


_open: weakref.WeakSet[Lending] = weakref.WeakSet()


def _before_fork() -> None:
    for lending in list(_open):
        lending.before_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)
