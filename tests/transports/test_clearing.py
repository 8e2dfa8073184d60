"""Where cores share no cache, a rank overwrites the data that it alone has read."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import on_ranks

from horovod.transports.shm.arena import INLINE_BYTES, STAGING_BYTES
from horovod.transports.shm.clearing import Clearing

MIB = 1 << 20
QUICK, SLOW = 26_000, 427_000


class Pair:
    """Two ranks over one control page; a fill of rank 0 takes as long as ``cost`` says."""

    def __init__(self, cost: Callable[[bool], int]) -> None:
        pages: Any = [SimpleNamespace(words64=[0, 0], clears=[0, 1], rank=rank) for rank in range(2)]
        pages[1].words64 = pages[0].words64
        self._mine, self._reader = Clearing(pages[0]), Clearing(pages[1])
        self._cost, self._cleared = cost, 0

    def fills(self, count: int) -> list[bool]:
        """Fill so often; return whether the reader overwrote the data each time."""
        found = []
        for _ in range(count):
            before = self._cleared
            self._reader.clear(0, None, self)  # type: ignore[arg-type]
            found.append(self._cleared > before)
            self._mine.note(MIB, self._cost(found[-1]))
        return found

    def clear(self, place: object) -> None:
        """See ``Kernels``."""
        self._cleared += 1


def test_a_rank_that_fills_quickly_has_nothing_overwritten() -> None:
    assert not any(Pair(lambda _: QUICK).fills(5000))


def test_single_slow_fills_change_nothing() -> None:
    costs = itertools.cycle([SLOW, SLOW, SLOW, QUICK])
    assert not any(Pair(lambda _: next(costs)).fills(4000))


def test_slow_memory_is_overwritten_nearly_always() -> None:
    found = Pair(lambda cleared: QUICK if cleared else SLOW).fills(10_000)
    assert found[:8] == [False] * 8
    assert found.count(True) > 9_900
    assert found.count(False) > 10  # now and then the rank checks whether it still needs it


def test_overwriting_ends_when_the_memory_is_quick_again() -> None:
    apart = True
    pair = Pair(lambda cleared: SLOW if apart and not cleared else QUICK)
    assert any(pair.fills(100))
    apart = False
    pair.fills(1024)
    assert not any(pair.fills(5000))


def _transport() -> Any:
    """Let every reader overwrite, whatever the machine is like; return this rank's transport."""
    import horovod.numpy as hvd
    from horovod import context

    transport: Any = context.engine().transport
    transport.staging.clearing.note = lambda *_: None
    transport.control.words64[transport.control.clears[hvd.rank()]] = 1
    hvd.barrier()
    return transport


def _left(transport: Any) -> int:
    """Return how many numbers are left in the fixed front of this rank's arena."""
    shown = np.frombuffer(transport.arena.memory, "float64", (INLINE_BYTES + STAGING_BYTES) // 8).copy()
    shown[INLINE_BYTES // 8] = 0  # where this rank's result lies is no data
    return int(np.count_nonzero(shown))


@pytest.mark.parametrize("dtype", ["int64", "float64"])
@pytest.mark.parametrize("elements", [5_000, 100_000, 1_000_000], ids=["inline", "inline, much", "staged"])
@on_ranks(2, returns=[0, 0])
def test_an_allreduce_of_two_ranks_leaves_nothing_behind(elements: int, dtype: str) -> int:
    import horovod.numpy as hvd

    transport = _transport()
    for _ in range(6):
        array = np.arange(elements).astype(dtype) + hvd.rank()
        hvd.allreduce_(array, name="x", op=hvd.Sum)
        np.testing.assert_array_equal(array, 2 * np.arange(elements).astype(dtype) + 1)
    hvd.barrier()
    return _left(transport)


@on_ranks(2)
def test_small_averages_of_a_large_group_stay_until_both_ranks_have_read_them() -> None:
    import horovod.numpy as hvd

    _transport()
    for step in range(200):
        group = [np.full(1000, float(hvd.rank() + step + i), "float32") for i in range(20)]
        for i, result in enumerate(hvd.grouped_allreduce(group, name="g")):
            np.testing.assert_array_equal(result, np.full(1000, step + i + 0.5, "float32"))


@pytest.mark.parametrize("rows", [30_000, 1_500_000], ids=["inline", "staged"])
@pytest.mark.parametrize("kind", ["broadcast", "allgather", "alltoall", "reducescatter"])
@on_ranks(2)
def test_a_rank_overwrites_what_it_alone_has_read(kind: str, rows: int) -> None:
    import horovod.numpy as hvd
    from horovod.transports.results import private_region

    transport = _transport()
    transport.results._make = private_region  # else the others write to the results, and nothing is shown
    mine = np.full((2 * rows,), hvd.rank() + 1.0)
    if kind == "broadcast":
        np.testing.assert_array_equal(hvd.broadcast(mine, 1, name="x"), np.full(2 * rows, 2.0))
        hvd.broadcast_(mine, 1, name="y")
        np.testing.assert_array_equal(mine, np.full(2 * rows, 2.0))
    elif kind == "allgather":
        np.testing.assert_array_equal(hvd.allgather(mine, name="x"), np.repeat([1.0, 2.0], 2 * rows))
    elif kind == "alltoall":
        np.testing.assert_array_equal(hvd.alltoall(mine, name="x"), np.repeat([1.0, 2.0], rows))
    else:
        np.testing.assert_array_equal(hvd.reducescatter(mine, op=hvd.Sum, name="x"), np.full(rows, 3.0))
    hvd.barrier()
    # Inline, half of the data is for the rank itself where the other one reads half.
    left = 0.5 if rows == 30_000 and kind in ("alltoall", "reducescatter") else 0.0
    assert _left(transport) / (2 * rows) == left


@on_ranks(3)
def test_data_that_several_ranks_read_stays() -> None:
    import horovod.numpy as hvd

    _transport()
    for step in range(4):
        mine = np.full(300_000, hvd.rank() + 1.0 + step)
        np.testing.assert_array_equal(hvd.broadcast(mine, 2, name="b"), np.full(300_000, 3.0 + step))
        hvd.allreduce_(mine, name="r", op=hvd.Sum)
        np.testing.assert_array_equal(mine, np.full(300_000, 6.0 + 3 * step))
