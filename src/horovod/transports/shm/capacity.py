"""Computes the size of an arena: the machine's memory, or the share that the limits of this process leave."""

from __future__ import annotations

import mmap
import os
import resource
from pathlib import Path

from horovod.errors import InitError
from horovod.transports.shm.arena import HEAP_START

__all__ = ["LEAST_BYTES", "arena_bytes", "share_of"]

#: The buffers at the front, and room for a tensor.
LEAST_BYTES = HEAP_START + mmap.PAGESIZE
#: Bytes that a process can address on x86-64, and on nearly all aarch64; elsewhere mmap's error names the remedy.
_ADDRESS_SPACE = 1 << 47


def arena_bytes(wanted: int, ranks: int) -> int:
    """Return the size of this rank's arena in bytes: HOROVOD_ARENA_BYTES, or with 0 what suits the machine. Each rank
    on this host maps the arenas of all.

    Raises:
        InitError: the arena would be too small.
    """
    if wanted:
        if wanted < LEAST_BYTES:
            raise InitError(
                f"HOROVOD_ARENA_BYTES={wanted} is too small: {LEAST_BYTES} bytes are needed for the buffers of the "
                "collectives, and more for tensors; unset it to use as much as the machine has"
            )
        return wanted
    physical, limit = mmap.PAGESIZE * os.sysconf("SC_PHYS_PAGES"), resource.getrlimit(resource.RLIMIT_AS)[0]
    found = share_of(ranks, physical, limit, _mapped())
    if found < LEAST_BYTES:
        raise InitError(
            f"`ulimit -v` leaves {max(found, 0)} bytes for the shared memory of each of {ranks} ranks, "
            f"but {LEAST_BYTES} are needed; raise it, or start fewer ranks"
        )
    return found


def share_of(ranks: int, physical: int, limit: int, mapped: int) -> int:
    """Return the bytes of one arena, if every rank maps the arenas of all. No more than the machine's ``physical``
    memory can ever be in use, and a process may map ``limit``, or ``RLIM_INFINITY``.
    """
    # A process needs addresses for threads, libraries and its own tensors, too.
    shares = [physical, _ADDRESS_SPACE // 4 // ranks]
    if limit != resource.RLIM_INFINITY:
        shares.append((limit - mapped) // 2 // ranks)
    return min(shares) // mmap.PAGESIZE * mmap.PAGESIZE


def _mapped() -> int:
    """Return the bytes that this process has mapped; 0 if the system does not tell."""
    try:
        return mmap.PAGESIZE * int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # no descriptor is left, or /proc is missing: the maker of an arena reports this better
        return 0
