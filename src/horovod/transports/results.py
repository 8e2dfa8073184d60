"""Memory of large results, used again and again.

The kernel clears fresh memory page by page, which takes as long as all the rest of an allgather. So results of
operations that are not in place lie in blocks that come back with their tensors and are lent again. If ranks share
memory, the blocks lie in it, so that other ranks can write their part of a result to its place.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["LEAST_BYTES", "Block", "Region", "ResultPool", "private_region"]

#: For smaller results, the C library usually has memory at hand.
LEAST_BYTES = 512 << 10
#: Steps between sizes of blocks, per power of two: an eighth is wasted at most.
_STEPS = 8
#: A block may be lent for a result of this part of its size or more, since lengths vary.
_LEAST_USE = 0.6
_MOST_FREE_BYTES = 512 << 20
_IDLE_S = 5.0


class Region:
    """Memory of a block. ``place`` is where other ranks reach it, or -1 if they cannot."""

    __slots__ = ("memory", "place", "start")

    def __init__(self, memory: mmap.mmap, start: int = 0, place: int = -1) -> None:
        self.memory = memory
        self.start = start
        self.place = place

    def lend(self, nbytes: int) -> None:
        """Note that it has a user from now on."""

    def take_back(self) -> None:
        """Note that it has no user any more."""

    def release(self) -> None:
        """Give it back to the system."""


def private_region(nbytes: int) -> Region | None:
    """Return memory that no other process has mapped; None if there is none."""
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return Region(memory)


class Block:
    """Memory that is lent as a whole."""

    __slots__ = ("freed_s", "nbytes", "region", "view")

    def __init__(self, region: Region, nbytes: int) -> None:
        self.region = region
        self.nbytes = nbytes
        # the type of the lent buffer; making this type takes longer than all the rest of lending
        self.view = ctypes.c_char * nbytes
        self.freed_s = 0.0  # when it came back, in seconds of the clock


class ResultPool:
    """Lends memory; see the module. ``make`` returns memory for a new block."""

    def __init__(
        self,
        most_free_bytes: int = _MOST_FREE_BYTES,
        clock: Callable[[], float] = time.monotonic,
        make: Callable[[int], Region | None] = private_region,
    ) -> None:
        self._most = min(most_free_bytes, mmap.PAGESIZE * os.sysconf("SC_PHYS_PAGES") // 16)
        self._clock = clock
        self._make = make
        # The pages of the block that came back last are most likely in a cache.
        self._free: list[Block] = []
        # Finalizers run anywhere, also while a block is taken: only an append is safe there.
        self._returned: collections.deque[weakref.ref[Any]] = collections.deque()
        # Keep the weak references: they report the end of their objects only while they exist.
        self._lent: dict[int, tuple[weakref.ref[Any], Block]] = {}
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self.place = -1  # where other ranks reach the block that was lent last, or -1

    def take(self, nbytes: int, least: int = LEAST_BYTES) -> Any | None:
        """Return a buffer of at least ``nbytes``, not cleared, which comes back when its last user is gone.

        Return None for less than ``least``, or when there is no memory of this kind.
        """
        if nbytes < least:
            return None
        with self._lock:
            self._collect()
            for index in range(len(self._free) - 1, -1, -1):
                block = self._free[index]
                if nbytes <= block.nbytes and nbytes >= _LEAST_USE * block.nbytes:
                    del self._free[index]
                    return self._lend(block)
            step = max(mmap.PAGESIZE, (1 << (nbytes - 1).bit_length()) // (2 * _STEPS))
            size = -(-nbytes // step) * step
            region = self._make(size)
            return None if region is None else self._lend(Block(region, size))

    def rest(self) -> None:
        """Release blocks that were not used lately."""
        if self._free or self._returned:
            with self._lock:
                self._collect()
                self._drop(self._clock() - _IDLE_S)

    def shrink(self) -> None:
        """Release all blocks that are not lent."""
        with self._lock:
            self._collect()
            self._drop()

    def close(self) -> None:
        """Lend nothing any more; lent blocks go back to the system when their users are gone."""
        self._make = lambda nbytes: None
        with self._lock:
            self.shrink()
            for told, block in self._lent.values():
                if (view := told()) is not None:
                    # From now on, no call collects the returned blocks.
                    weakref.finalize(view, block.region.release).atexit = False
            self._lent.clear()

    @property
    def free_bytes(self) -> int:
        """Bytes of the free blocks."""
        with self._lock:
            self._collect()
            return sum(block.nbytes for block in self._free)

    def _lend(self, block: Block) -> Any:
        region = block.region
        # Not a memoryview: numpy would keep its base alive, not the view itself.
        view = block.view.from_buffer(region.memory, region.start)
        # Not a function of ours: an interrupt at its start would be dropped by Python, and the block lost.
        told = weakref.ref(view, self._returned.append)
        self._lent[id(told)] = told, block
        region.lend(block.nbytes)
        self.place = region.place
        return view

    def _collect(self) -> None:
        if not self._returned or os.getpid() != self._owner:
            return
        now = self._clock()
        while self._returned:
            lent = self._lent.pop(id(self._returned.popleft()), None)
            # None: an interrupt came before it was lent.
            if lent is not None:
                block = lent[1]
                block.region.take_back()
                block.freed_s = now
                self._free.append(block)
        total = 0
        for index in range(len(self._free) - 1, -1, -1):
            total += self._free[index].nbytes
            if total > self._most:
                surplus, self._free = self._free[: index + 1], self._free[index + 1 :]
                for block in surplus:
                    block.region.release()
                return

    def _drop(self, before_s: float = float("inf")) -> None:
        # One by one: a released block may be the last user of another object.
        kept = []
        while self._free:
            block = self._free.pop()
            if block.freed_s > before_s:
                kept.append(block)
            else:
                block.region.release()
        self._free[:0] = reversed(kept)
