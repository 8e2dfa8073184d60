"""The machine's memory bandwidth with all ranks at it: the limit that any data plane lives under."""

from __future__ import annotations

import time

import torch

from horovod.bench.control import Control
from horovod.bench.host import available_bytes

__all__ = ["memory_bandwidth"]

_LARGEST = 128 << 20
_ROUNDS = 5
_COPIES = 3


def memory_bandwidth(control: Control, *, largest: int = _LARGEST) -> float:
    """Bytes per second that all ranks together read and write when each copies a large tensor.

    Args:
        control: how the ranks agree.
        largest: bytes of one copy; less when memory is scarce.

    Returns:
        The best of a few rounds, for it is a limit: ``2 * bytes * copies * ranks``, by the time from the first
        rank's start to the last one's end.
    """
    nbytes = control.broadcast(min(largest, (available_bytes() or largest << 3) // (8 * control.size)))
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.empty_like(source).copy_(source)
    best = 0.0
    for _ in range(_ROUNDS):
        control.barrier()
        start = time.monotonic()
        for _ in range(_COPIES):
            target.copy_(source)
        # One clock for all processes of the host, so that ranks that share a core are not counted as parallel.
        starts, ends = zip(*control.gather((start, time.monotonic())), strict=True)
        best = max(best, 2 * nbytes * _COPIES * control.size / (max(ends) - min(starts)))
    return best
