"""Memory of results: used again once its tensor is gone, never before, and given back when nobody needs it."""

from __future__ import annotations

import gc
import os
import warnings
from typing import Any

import numpy as np
import pytest
from harness import on_ranks
from injection import at_line

from horovod.transports.results import LEAST_BYTES, ResultPool

MIB = 1 << 20


def _array(pool: ResultPool, nbytes: int = MIB) -> np.ndarray[Any, Any]:
    memory = pool.take(nbytes)
    assert memory is not None
    return np.ndarray(nbytes, np.uint8, memory)


def test_memory_comes_back_with_the_last_view_of_it() -> None:
    pool = ResultPool()
    first = _array(pool)
    address, part = first.ctypes.data, first.reshape(2, -1)[1:]
    del first
    assert _array(pool).ctypes.data != address
    assert pool.free_bytes == MIB, "the one that was looked at"
    del part
    assert {_array(pool).ctypes.data for _ in range(4)} >= {address}


def test_an_interrupt_as_the_last_view_goes_neither_loses_the_memory_nor_is_lost() -> None:
    pool = ResultPool()
    first = _array(pool)
    with at_line(1) as raised:
        del first
    assert not raised, "nothing of ours runs there"
    assert pool.free_bytes == MIB


def test_little_is_left_to_the_c_library() -> None:
    assert ResultPool().take(LEAST_BYTES - 1) is None


def test_what_a_loan_takes_to_make_is_made_once_for_each_block() -> None:
    pool = ResultPool()
    assert len({type(pool.take(MIB)) for _ in range(8)}) == 1
    gc.collect()
    kept = type(pool.take(MIB))
    gc.collect()
    assert type(pool.take(MIB)) is kept


@pytest.mark.parametrize("nbytes", [2 * LEAST_BYTES, MIB + 1, 5 * MIB - 3, 9 * MIB])
def test_a_block_serves_similar_lengths_and_wastes_little(nbytes: int) -> None:
    pool = ResultPool()
    memory = pool.take(nbytes)
    assert nbytes <= len(memory) <= nbytes * 9 / 8 + 4096
    size = len(memory)
    del memory
    assert len(pool.take(int(nbytes * 0.7)) or b"") == size
    assert len(pool.take(nbytes // 2 + 4096) or b"") < size


def test_no_more_waits_than_allowed() -> None:
    pool = ResultPool(most_free_bytes=3 * MIB)
    held = [_array(pool) for _ in range(10)]
    held.clear()
    assert pool.free_bytes <= 3 * MIB


def test_what_is_not_needed_goes_back_to_the_system() -> None:
    now = [100.0]
    pool = ResultPool(clock=lambda: now[0])
    kept = _array(pool)
    _array(pool, 2 * MIB)
    pool.rest()
    assert pool.free_bytes == 2 * MIB
    now[0] += 60
    pool.rest()
    assert pool.free_bytes == 0
    kept[:] = 1


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks()
def test_results_never_share_memory_and_outlive_the_job() -> None:
    import torch

    import horovod.torch as hvd

    size, rank, count = hvd.size(), hvd.rank(), 600_000
    ours = torch.full((count,), rank + 1.0)
    kept = []
    for turn in range(6):
        given = ours + turn
        total = size * (size + 1) / 2 + turn * size
        found = [hvd.allreduce(given, op=hvd.Sum), hvd.allgather(given), hvd.reducescatter(given, op=hvd.Sum)]
        found += [hvd.broadcast(given, 1), hvd.alltoall(given), *hvd.grouped_allreduce([given, given], op=hvd.Sum)]
        sums = [total * count, total * count, None, (2 + turn) * count, None, total * count, total * count]
        kept.append((found, [float(f.double().sum()) if s is None else s for f, s in zip(found, sums, strict=True)]))
        for tensors, expected in kept[-2:]:
            assert [float(tensor.double().sum()) for tensor in tensors] == expected
        places = [tensor.data_ptr() for tensors, _ in kept[-2:] for tensor in tensors]
        assert len(set(places)) == len(places), "two results in one place"
        if turn % 2:
            kept.pop(0)
    result = hvd.allreduce(ours.requires_grad_(), op=hvd.Sum)
    result += 1
    result.sum().backward()
    last = hvd.allgather(ours.detach().view(2, -1))
    assert last.shape == (2 * size, count // 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        last.numpy()[:] = 0  # not by torch, whose threads are not in the child
        kept.clear()
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    hvd.shutdown()
    assert float(last.sum()) == count * size * (size + 1) / 2
    fresh = torch.zeros(2 * size * count)
    assert not fresh.any()
    assert float(last.sum()) == count * size * (size + 1) / 2


@pytest.mark.parametrize("kind", ["ALLGATHER", "ALLTOALL"])
@pytest.mark.parametrize(("is_graph", "wanted"), [([False, False], 2), ([False, True], 0), ([True, True], 0)])
@on_ranks(2)
def test_where_a_graph_makes_its_results_nobody_asks_where_they_lie(
    kind: str, is_graph: list[bool], wanted: int
) -> None:
    import horovod.numpy as hvd
    from horovod import context
    from horovod.bindings.numpy_adapter import NumpyAdapter
    from horovod.core.requests import Kind
    from horovod.engine.calls import call
    from horovod.transports.shm import moves

    class Graph:
        """Makes its results where it likes."""

        kernels, address, empty = "numpy", NumpyAdapter.address, NumpyAdapter.empty

    asked, find = [0], moves.find_results

    def counted(*args: Any) -> Any:
        asked[0] += 1
        return find(*args)

    rank, rows = hvd.rank(), 1 << 18
    allocator: Any = Graph() if is_graph[rank] else NumpyAdapter()
    moves.find_results = counted
    try:
        for attempt in range(2):
            mine = np.full(rows, rank + attempt, np.float32)
            (result,) = context.engine().run(call(Kind[kind], "beside"), allocator, [mine]).outputs
            halves = np.asarray(result).reshape(2, -1)
            assert (halves == np.array([[attempt], [attempt + 1]])).all()
    finally:
        moves.find_results = find
    assert asked == [wanted]
