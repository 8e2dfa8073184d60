"""Computes the size of an arena: the machine's memory, or the share that the limits of this process leave."""

from __future__ import annotations

import functools
import mmap
import os
import resource
from pathlib import Path

from horovod.errors import InitError
from horovod.transports.shm.arena import HEAP_START

__all__ = ["LEAST_BYTES", "arena_bytes", "share_of"]

#: The buffers at the front, and room for a tensor.
LEAST_BYTES = HEAP_START + mmap.PAGESIZE
#: Every supported processor gives a process this much.
_LEAST_ADDRESS_SPACE = 1 << 39


def arena_bytes(wanted: int, ranks: int) -> int:
    """Return the size of this rank's arena in bytes.

    Args:
        wanted: HOROVOD_ARENA_BYTES; 0 to let it depend on the machine.
        ranks: number of ranks on this host; each maps the arenas of all.

    Raises:
        InitError: the arena would be too small.
    """
    if wanted:
        if wanted < LEAST_BYTES:
            raise InitError(
                f"HOROVOD_ARENA_BYTES={wanted} is too small: {LEAST_BYTES} are needed for the buffers of the "
                "collectives, and more for tensors; unset it to use as much as the machine has"
            )
        return wanted
    found = share_of(
        ranks,
        physical=mmap.PAGESIZE * os.sysconf("SC_PHYS_PAGES"),
        address_space=_address_space(),
        limit=_limit(resource.RLIMIT_AS),
        mapped=_mapped(),
        file_limit=_limit(resource.RLIMIT_FSIZE),
    )
    if found < LEAST_BYTES:
        raise InitError(
            f"`ulimit -v` or `ulimit -f` leaves {max(found, 0)} bytes for the shared memory of each of {ranks} ranks, "
            f"but {LEAST_BYTES} are needed; raise it, or start fewer ranks"
        )
    return found


def share_of(ranks: int, physical: int, address_space: int, limit: int, mapped: int, file_limit: int) -> int:
    """Return the bytes of one arena, if every rank maps the arenas of all; a limit below 0 means no limit.

    Args:
        ranks: number of ranks.
        physical: memory of the machine; more of an arena can never be in use.
        address_space: bytes that a process can address.
        limit: bytes that this process may map.
        mapped: bytes that it has mapped already.
        file_limit: bytes of the largest file that it may make.
    """
    # A process needs addresses for threads, libraries and its own tensors, too.
    shares = [physical, address_space // 4 // ranks]
    if limit >= 0:
        shares.append((limit - mapped) // 2 // ranks)
    if file_limit >= 0:
        shares.append(file_limit)
    return min(shares) // mmap.PAGESIZE * mmap.PAGESIZE


def _limit(which: int) -> int:
    limit = resource.getrlimit(which)[0]
    return -1 if limit == resource.RLIM_INFINITY else limit


def _mapped() -> int:
    """Return the bytes that this process has mapped; 0 if the system does not tell."""
    try:
        return mmap.PAGESIZE * int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # no descriptor is left, or /proc is missing: the maker of an arena reports this better
        return 0


@functools.cache
def _address_space() -> int:
    """Return the bytes that a process can address: its stack lies near their end."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return _LEAST_ADDRESS_SPACE
    ends = [int(line.split("-", 2)[1].split()[0], 16) for line in lines]
    return 1 << (max(end for end in ends if end < 1 << 63) - 1).bit_length()
