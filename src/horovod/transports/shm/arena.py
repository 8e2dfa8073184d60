"""Every rank's arena: memory that all ranks of the host have mapped.

One memfd per rank, sparse, as large as the machine's memory. An allocation is an offset, so a peer finds
the same bytes as (rank, offset). The front is fixed: a ring buffer for inline messages,
then the staging buffers; behind it lies the heap. Freed pages go back to the system.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from pathlib import Path
from typing import Any

from horovod.transports.kernels import Buffer
from horovod.transports.libraries import kernels_named
from horovod.transports.results import Region, ResultPool
from horovod.transports.shm.mapping import address_of, map_shared, populate, unmap
from horovod.transports.shm.reuse import Recurring

__all__ = ["BLOCK_BYTES", "HEAP_START", "INLINE_BYTES", "ROTATION_BYTES", "STAGING_BYTES", "Arena", "Heap"]

INLINE_BYTES = 8 << 20
STAGING_BYTES = 4 << 20
HEAP_START = INLINE_BYTES + STAGING_BYTES
_ALIGN = mmap.PAGESIZE
#: Kept views of the staging buffers, which have few sizes.
_MOST_VIEWS = 256
#: Part of the heap that results may take; the user's own tensors find room in the rest.
_MOST_LENT = 0.5


def _own_cache_bytes() -> int:
    """Return the size of a core's own second-level cache, or a guess."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(text.removesuffix("K").removesuffix("M")) * (1 << 20 if text.endswith("M") else 1 << 10)
    except (OSError, ValueError):
        return 1 << 20


_OWN = _own_cache_bytes()

#: Two inputs and a result of this size fit into a core's own cache.
BLOCK_BYTES = min(max(_OWN // 4, 64 << 10), 1 << 20)

#: Memory that another core has read is slow to write again while it is in that core's cache: filling 64 KiB took
#: 8 us, and 3 us once it had left the reader's cache. So data for other ranks rotates through this many bytes.
ROTATION_BYTES = min(max(2 * _OWN, 1 << 20), 4 << 20)


class Heap:
    """First-fit allocator of page-aligned ranges; pure."""

    def __init__(self, start: int, end: int) -> None:
        self._free: list[tuple[int, int]] = [(start, end)]
        self._nbytes = end - start

    def take(self, nbytes: int) -> int:
        """Return the offset of a free range of ``nbytes``.

        Raises:
            MemoryError: no range is large enough.
        """
        need = max(_ALIGN, -(-nbytes // _ALIGN) * _ALIGN)
        for index, (start, end) in enumerate(self._free):
            if end - start >= need:
                if end - start == need:
                    del self._free[index]
                else:
                    self._free[index] = (start + need, end)
                return start
        free = sum(end - start for start, end in self._free)
        largest = max((end - start for start, end in self._free), default=0)
        raise MemoryError(
            f"the arena has no free range of {need} bytes: {free} of {self._nbytes} are left, {largest} in "
            f"one piece; free tensors that live in it, or raise HOROVOD_ARENA_BYTES"
        )

    def give(self, offset: int, nbytes: int) -> None:
        """Take a range back and join it with its free neighbours."""
        start, end = offset, offset + max(_ALIGN, -(-nbytes // _ALIGN) * _ALIGN)
        index = bisect.bisect(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            start = self._free.pop(index - 1)[0]
            index -= 1
        self._free.insert(index, (start, end))


class Arena:
    """One rank's arena, as mapped by this process, which allocates only in its own. The memfd stays the caller's."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        # Bytes of tensors by their offset: a forked child gets a copy of these.
        self._live: dict[int, int] = {}
        self.memory = map_shared(fd, nbytes, live=self._live)  # the whole mapping
        with contextlib.suppress(OSError):
            self.memory.madvise(mmap.MADV_DONTDUMP)
        with contextlib.suppress(OSError):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.base = address_of(self.memory)  # address of its first byte
        self._owner = os.getpid()
        self._heap = Heap(HEAP_START, nbytes)
        self._lock = threading.Lock()
        self._returned: collections.deque[tuple[int, int]] = collections.deque()
        self._views = Recurring(_MOST_VIEWS)
        self._lent_bytes = 0
        self.results = ResultPool(make=self._region)  # lends memory to results

    def view(self, kernels: str, offset: int, dtype: str, shape: tuple[int, ...]) -> Buffer:
        """Return an array over the arena; from the second time on the same call gives the same array."""
        key = (kernels, offset, dtype, shape)
        view = self._views.kept.get(key)
        return self._views.get(key, lambda: self.view_once(kernels, offset, dtype, shape)) if view is None else view

    def view_once(self, kernels: str, offset: int, dtype: str, shape: tuple[int, ...]) -> Buffer:
        """Return an array over the arena without keeping it here: the caller keeps it, or needs it only once."""
        return kernels_named(kernels).view(self.memory, offset, dtype, shape)

    def allocate(self, nbytes: int) -> Any:
        """Return a buffer of ``nbytes`` zeroed bytes in the arena, freed with its last user.

        Raises:
            MemoryError: the arena is full.
        """
        try:
            offset = self.take(nbytes)
        except MemoryError:
            self.results.shrink()
            offset = self.take(nbytes)
        block = (ctypes.c_char * nbytes).from_buffer(self.memory, offset)
        self._live[offset] = nbytes
        weakref.finalize(block, self.give, offset, nbytes).atexit = False
        return block

    def take(self, nbytes: int) -> int:
        """Return the offset of memory that is taken until ``give``.

        Raises:
            MemoryError: the arena is full.
        """
        with self._lock:
            while self._returned:
                self._heap.give(*self._returned.popleft())
            return self._heap.take(nbytes)

    def give(self, offset: int, nbytes: int) -> None:
        """Take memory back, and return its pages to the system; any thread may call this at any time."""
        if os.getpid() != self._owner:
            # A forked child has dropped its copy; the parent's tensor lives on.
            return
        self._live.pop(offset, None)
        length = -(-nbytes // _ALIGN) * _ALIGN
        with contextlib.suppress(OSError, ValueError, ReferenceError):
            self.memory.madvise(mmap.MADV_REMOVE, offset, length)
        # Finalizers run anywhere, also inside take(): only an append is safe here.
        self._returned.append((offset, nbytes))

    def offset_of(self, address: int) -> int:
        """Return the offset of an address, or -1 when it lies elsewhere."""
        offset = address - self.base
        return offset if 0 <= offset < self.nbytes else -1

    def _region(self, nbytes: int) -> Region | None:
        """Return memory for results; None if these would take too much of the arena."""
        if self._lent_bytes + nbytes > _MOST_LENT * (self.nbytes - HEAP_START):
            return None
        try:
            offset = self.take(nbytes)
        except MemoryError:
            return None
        self._lent_bytes += nbytes
        populate(self.base + offset, nbytes)
        return _ResultRegion(self, offset, nbytes)

    def close(self) -> None:
        """Drop this process's own views; the mapping goes with the user's last tensor."""
        self.results.close()
        self._views.forget()
        unmap(self.memory)
        # Cycles of objects that refer to this one must not keep it until Python looks for them.
        self.memory = weakref.proxy(self.memory)


class _ResultRegion(Region):
    """Memory of a result in the arena."""

    __slots__ = ("_arena", "_nbytes")

    def __init__(self, arena: Arena, offset: int, nbytes: int) -> None:
        super().__init__(arena.memory, offset, offset)
        self._arena, self._nbytes = arena, nbytes

    def lend(self, nbytes: int) -> None:
        """Let forked children get a copy of it."""
        self._arena._live[self.start] = nbytes

    def take_back(self) -> None:
        """Do not copy it for forked children any more."""
        self._arena._live.pop(self.start, None)

    def release(self) -> None:
        """Give it back to the arena."""
        self._arena._lent_bytes -= self._nbytes
        self._arena.give(self.start, self._nbytes)
