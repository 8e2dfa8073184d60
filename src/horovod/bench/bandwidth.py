"""The machine's memory bandwidth with all ranks at it: the limit that any data plane lives under."""

from __future__ import annotations

import time

import torch

from horovod.bench.control import Control
from horovod.bench.host import available_bytes

__all__ = ["memory_bandwidth"]

_LARGEST = 128 << 20
_ROUNDS = 7


def memory_bandwidth(control: Control, *, largest: int = _LARGEST) -> float:
    """Bytes per second that all ranks together read and write when each copies a large tensor.

    Args:
        control: how the ranks agree.
        largest: bytes of one copy; less when memory is scarce.

    Returns:
        The best of a few rounds, for it is a limit: ``2 × bytes × ranks / slowest rank's time``.
    """
    nbytes = control.broadcast(min(largest, (available_bytes() or largest << 3) // (8 * control.size)))
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.empty_like(source).copy_(source)
    best = 0.0
    for _ in range(_ROUNDS):
        control.barrier()
        start = time.perf_counter()
        target.copy_(source)
        elapsed = max(control.gather(time.perf_counter() - start))
        best = max(best, 2 * nbytes * control.size / elapsed)
    return best
