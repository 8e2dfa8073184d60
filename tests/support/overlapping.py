"""Random operations of process sets that overlap, several in flight at once, compared with numpy."""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["overlapping"]

_KINDS = ["allreduce", "allreduce in the arena", "allgather", "broadcast", "alltoall", "reducescatter"]
_WEIGHTS = [1, 1, 2, 2, 1, 1]
#: Rows of a tensor: sent inline, one chunk, several chunks.
_ROWS, _ROW_WEIGHTS = [3, 5000, 300_001], [6, 20, 1]


def _data(key: int, rank: int, rows: int) -> Any:
    return np.arange(rows, dtype=np.int64) % 97 + 1000 * key + 100 * rank


def _start(hvd: Any, kind: str, ranks: Sequence[int], rows: int, key: int, **how: Any) -> tuple[Any, Any]:
    """Begin an operation on this rank; return its handle, and the result that is right."""
    rank, place, size = hvd.rank(), list(ranks).index(hvd.rank()), len(ranks)
    mine = _data(key, rank, rows)
    if kind.startswith("allreduce"):
        want = sum(_data(key, other, rows) for other in ranks)
        if kind == "allreduce":
            return hvd.allreduce_async(mine, op=hvd.Sum, **how), want
        arena = hvd.zeros(rows, dtype="int64")
        arena[...] = mine
        return hvd.allreduce_async_(arena, op=hvd.Sum, **how), want
    if kind == "broadcast":
        root = ranks[key % size]
        return hvd.broadcast_async(mine, root_rank=root, **how), _data(key, root, rows)
    if kind == "allgather":
        # Members have different numbers of rows.
        want = [_data(key, other, rows + other) for other in ranks]
        return hvd.allgather_async(_data(key, rank, rows + rank), **how), np.concatenate(want)
    if kind == "alltoall":
        want = [_data(key, other, rows * size)[place * rows : (place + 1) * rows] for other in ranks]
        return hvd.alltoall_async(_data(key, rank, rows * size), **how), np.concatenate(want)
    want = sum(_data(key, other, rows * size) for other in ranks)
    handle = hvd.reducescatter_async(_data(key, rank, rows * size), op=hvd.Sum, **how)
    return handle, want[place * rows : (place + 1) * rows]


def overlapping(seed: int, steps: int, in_flight: int = 5) -> None:
    """Run random operations; all ranks of a job call it.

    Args:
        seed: decides sets, operations and sizes, the same on all ranks; and each rank's own order of submission.
        steps: how often to begin ``in_flight`` operations and wait for all of them.
        in_flight: number of operations in flight.

    Raises:
        AssertionError: a result is wrong.
    """
    hvd = importlib.import_module("horovod.numpy")
    rank, size = hvd.rank(), hvd.size()
    common, own = random.Random(seed), random.Random(seed * 100 + rank)
    chosen = {tuple(sorted(common.sample(range(size), common.randint(2, size - 1)))) for _ in range(4)}
    sets = {ranks: hvd.add_process_set(list(ranks)) for ranks in sorted(chosen)}
    everybody = tuple(range(size))
    for step in range(steps):
        plan = [
            (key, kind, common.choice([*sets, everybody]), *common.choices(_ROWS, _ROW_WEIGHTS))
            for key, kind in enumerate(common.choices(_KINDS, _WEIGHTS, k=in_flight))
        ]
        mine = [one for one in plan if rank in one[2]]
        own.shuffle(mine)
        begun = []
        for key, kind, ranks, rows in mine:
            how = {"name": f"{kind} {key}"} if ranks == everybody else {"name": str(key), "process_set": sets[ranks]}
            begun.append((kind, ranks, rows, *_start(hvd, kind, ranks, rows, 10 * step + key, **how)))
        own.shuffle(begun)
        for kind, ranks, rows, handle, want in begun:
            found = hvd.synchronize(handle)
            found = found[0] if isinstance(found, tuple) else found
            np.testing.assert_array_equal(found, want, err_msg=f"{kind} of {rows} rows, ranks {ranks}, step {step}")
    for one in sets.values():
        hvd.remove_process_set(one)
