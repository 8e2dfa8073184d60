"""Memory that is slow to write is overwritten by its readers, where that helps."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import run_ranks

from horovod.transports.shm.arena import INLINE_BYTES, STAGING_BYTES
from horovod.transports.shm.eviction import Eviction
from horovod.transports.shm.staging import CHUNK_BYTES

MIB = 1 << 20
QUICK, SLOW = 26_000, 427_000
STAGING_BUFFERS = STAGING_BYTES // CHUNK_BYTES


class Pair:
    """Two ranks over one control page; ``fills`` of rank 0 take as long as ``cost`` says."""

    def __init__(self, cost: Callable[[bool], int]) -> None:
        words = [0, 0]
        pages: Any = [SimpleNamespace(words64=words, evict=[0, 1], rank=rank) for rank in range(2)]
        self.mine, self.reader = Eviction(pages[0]), Eviction(pages[1])
        self._cost = cost

    def fills(self, count: int) -> list[bool]:
        """Fill so often; return what the reader knew of it each time."""
        wanted = []
        for _ in range(count):
            wanted.append(self.reader.is_wanted_by(0))
            self.mine.note(MIB, self._cost(wanted[-1]))
        return wanted


def test_who_fills_quickly_wants_nothing() -> None:
    assert not any(Pair(lambda _: QUICK).fills(5000))


def test_one_slow_fill_is_an_accident() -> None:
    costs = iter([SLOW, SLOW, SLOW, QUICK] * 1000)
    assert not any(Pair(lambda _: next(costs)).fills(4000))


def test_the_first_use_of_the_staging_buffers_is_slow_for_another_reason() -> None:
    costs = iter([SLOW] * STAGING_BUFFERS + [QUICK] * 100)
    assert not any(Pair(lambda _: next(costs)).fills(100))


def test_where_overwriting_helps_it_is_wanted_nearly_always() -> None:
    wanted = Pair(lambda overwritten: QUICK if overwritten else SLOW).fills(10_000)
    assert wanted[:8] == [False] * 8
    assert wanted.count(True) > 9_900
    # Now and then the rank looks whether it still needs it.
    assert wanted.count(False) > 10


def test_where_it_stops_being_needed_it_is_not_wanted_any_more() -> None:
    apart = True
    pair = Pair(lambda overwritten: SLOW if apart and not overwritten else QUICK)
    assert any(pair.fills(100))
    apart = False
    pair.fills(2000)
    assert not any(pair.fills(5000))


def test_where_overwriting_does_not_help_it_is_hardly_wanted() -> None:
    wanted = Pair(lambda _: SLOW).fills(20_000)
    assert 0 < wanted.count(True) < 500


def _want() -> Any:
    """Want to have everything overwritten, from now on; return this rank's transport."""
    import horovod.numpy as hvd
    from horovod import context

    transport: Any = context.engine().transport
    control = transport.control
    control.words64[control.evict[hvd.rank()]] = 1
    transport.staging.eviction.note = lambda *_: None
    hvd.barrier()
    return transport


def _overwritten(elements: int, dtype: str) -> tuple[list[float], int]:
    import horovod.numpy as hvd

    transport = _want()
    results = []
    for _ in range(6):
        array = np.arange(elements).astype(dtype) + hvd.rank()
        hvd.allreduce_(array, name="x", op=hvd.Sum)
        np.testing.assert_array_equal(array, 2 * np.arange(elements).astype(dtype) + 1)
        results.append(float(array[-1]))
    hvd.barrier()
    shown = np.frombuffer(transport.arena.memory, "uint8", 12 << 20)
    return results, int(np.count_nonzero(shown))


@pytest.mark.parametrize("dtype", ["int64", "float64"])
@pytest.mark.parametrize("elements", [5_000, 100_000, 1_000_000], ids=["inline", "inline, much", "staged"])
def test_overwriting_changes_no_result_and_leaves_nothing(elements: int, dtype: str) -> None:
    for results, left in run_ranks(2, _overwritten, elements, dtype):
        assert results == [2.0 * elements - 1] * 6
        assert left == 0


def _moved(kind: str, rows: int) -> tuple[int, int]:
    """Return how many elements this rank has shown, and how many of them are left."""
    import horovod.numpy as hvd
    from horovod import context
    from horovod.transports.results import private_region

    transport = _want()
    # Else the others write to the results, and nothing is shown.
    transport.results._make = private_region
    rank = hvd.rank()
    mine = np.full((2 * rows,), rank + 1.0)
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
    assert context.engine().stats().operations >= 3
    left = np.frombuffer(transport.arena.memory, "float64", (INLINE_BYTES + STAGING_BYTES) // 8).copy()
    # Where this rank's result lies is no data.
    left[INLINE_BYTES // 8] = 0
    return 2 * rows, int(np.count_nonzero(left))


@pytest.mark.parametrize("rows", [30_000, 1_500_000], ids=["inline", "staged"])
@pytest.mark.parametrize("kind", ["broadcast", "allgather", "alltoall", "reducescatter"])
def test_who_alone_reads_a_place_overwrites_what_it_has_read(kind: str, rows: int) -> None:
    # Half of what is inline is for this rank itself, where the other one reads half; what is staged is for others.
    left = 0.5 if rows == 30_000 and kind in ("alltoall", "reducescatter") else 0.0
    assert [remaining / shown for shown, remaining in run_ranks(2, _moved, kind, rows)] == [left, left]
