"""Memory of large results, used again and again.

Fresh memory has to be cleared by the kernel, page by page, which takes as long as all the rest of an allgather. So
results of operations that are not in place lie in blocks that come back with their tensors and are lent again. Nobody
else has these blocks mapped: a forked child keeps what it has, and results outlive ``shutdown()``.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["LEAST_BYTES", "ResultPool"]

#: The C library has memory for less at hand, as a rule.
LEAST_BYTES = 512 << 10
#: Steps between sizes of blocks, per power of two: what is lost is an eighth at most.
_STEPS = 8
#: A block may be lent for a result of this part of its size, when lengths vary.
_LEAST_USE = 0.6
_MOST_FREE_BYTES = 512 << 20
_IDLE_S = 5.0


class _Block:
    """Memory that is lent as a whole.

    Attributes:
        view: makes what is lent of it; to make such a type takes longer than all the rest of lending.
        freed_s: when it came back.
    """

    __slots__ = ("freed_s", "memory", "nbytes", "view")

    def __init__(self, memory: mmap.mmap, nbytes: int) -> None:
        self.memory = memory
        self.nbytes = nbytes
        self.view = ctypes.c_char * nbytes
        self.freed_s = 0.0


class ResultPool:
    """Lends memory; see the module.

    Args:
        most_free_bytes: how much may wait to be lent again.
        clock: seconds, for how long it has waited.
    """

    def __init__(self, most_free_bytes: int = _MOST_FREE_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = min(most_free_bytes, mmap.PAGESIZE * os.sysconf("SC_PHYS_PAGES") // 16)
        self._clock = clock
        # The block that came back last is the one whose pages are most likely in a cache.
        self._free: list[_Block] = []
        # Finalizers run anywhere, also while a block is taken: only an append is safe there.
        self._returned: collections.deque[weakref.ref[Any]] = collections.deque()
        # A reference tells that its object is gone only as long as somebody keeps it.
        self._lent: dict[int, tuple[weakref.ref[Any], _Block]] = {}

    def take(self, nbytes: int) -> Any | None:
        """Return a buffer of at least ``nbytes``, not cleared, which comes back when its last user is gone.

        Returns:
            None for little, or when there is no memory of this kind.
        """
        if nbytes < LEAST_BYTES:
            return None
        self._collect()
        for index in range(len(self._free) - 1, -1, -1):
            block = self._free[index]
            if nbytes <= block.nbytes and nbytes >= _LEAST_USE * block.nbytes:
                del self._free[index]
                return self._lend(block)
        step = max(mmap.PAGESIZE, (1 << (nbytes - 1).bit_length()) // (2 * _STEPS))
        size = -(-nbytes // step) * step
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:
            return None
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return self._lend(_Block(memory, size))

    def rest(self) -> None:
        """Give back what nobody has asked for lately."""
        if self._free or self._returned:
            self._collect()
            long_ago = self._clock() - _IDLE_S
            self._free = [block for block in self._free if block.freed_s > long_ago]

    @property
    def free_bytes(self) -> int:
        """How much waits to be lent again."""
        self._collect()
        return sum(block.nbytes for block in self._free)

    def _lend(self, block: _Block) -> Any:
        # Not a memoryview: numpy would keep alive what is below it, not the view itself.
        view = block.view.from_buffer(block.memory)
        told = weakref.ref(view, self._returned.append)
        self._lent[id(told)] = told, block
        return view

    def _collect(self) -> None:
        if not self._returned:
            return
        now = self._clock()
        while self._returned:
            lent = self._lent.pop(id(self._returned.popleft()), None)
            # None: an interrupt came before it was lent.
            if lent is not None:
                block = lent[1]
                block.freed_s = now
                self._free.append(block)
        total = 0
        for index in range(len(self._free) - 1, -1, -1):
            total += self._free[index].nbytes
            if total > self._most:
                del self._free[: index + 1]
                return
