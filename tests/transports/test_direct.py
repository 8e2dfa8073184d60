"""Results to which every rank writes its part: right whatever the parts, and the user's own like any other memory."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from forking import in_child
from harness import run_ranks

from horovod.transports.shm.arena import HEAP_START, Arena
from horovod.transports.shm.lending import Lending
from horovod.transports.shm.mapping import create_memfd

MIB = 1 << 20
Array = np.ndarray[Any, Any]


def _array(lending: Lending, nbytes: int = MIB) -> Array:
    memory = lending.pool.take(nbytes)
    assert memory is not None
    return np.ndarray(nbytes, np.uint8, memory)


class _Case:
    """An arena, seen by its rank and by another one, and how far the other one is."""

    def __init__(self, nbytes: int = HEAP_START + 16 * MIB) -> None:
        fd = create_memfd("horovod-test", nbytes)
        self.arena, self.other = Arena(fd, nbytes), Arena(fd, nbytes, is_own=False)
        os.close(fd)
        self.reached = 0
        flags: Any = SimpleNamespace(reached=lambda members, fence: self.reached >= fence)
        self.lending = Lending(self.arena, flags)

    def seen_by_other(self, array: Array) -> Array:
        """Return the same memory as the other rank has it."""
        start = array.ctypes.data - self.arena.base
        assert 0 <= start < self.arena.nbytes
        assert self.arena.offset_of(array.ctypes.data) < 0, "others must not count on it"
        return np.frombuffer(self.other.memory, np.uint8, array.nbytes, start)


def test_a_child_has_what_was_there_when_it_was_forked() -> None:
    case = _Case()
    pool, kept = case.lending.pool, [_array(case.lending, 3 * MIB)]
    kept[0][:] = 7
    pool.settle((1,), 5)
    case.reached = 5
    address = kept[0].ctypes.data
    told, tell = os.pipe()

    def parent_goes_on() -> None:
        kept[0][:] = 9
        kept.clear()
        gc.collect()
        again = _array(case.lending, 3 * MIB)
        assert again.ctypes.data == address
        again[:] = 4
        assert int(case.seen_by_other(again).sum()) == 4 * 3 * MIB, "shared again"
        case.seen_by_other(again)[:] = 5
        assert int(again.sum()) == 5 * 3 * MIB
        os.write(tell, b"x")

    def child_looks_then() -> bool:
        assert os.read(told, 1) == b"x"
        same = int(kept[0].sum()) == 7 * 3 * MIB
        kept[0][:] = 1
        # A child of the child has what the child had.
        return same and in_child(lambda: int(kept[0].sum()) == 3 * MIB)

    assert in_child(child_looks_then, parent_goes_on)
    os.close(told)
    os.close(tell)


def test_what_others_still_write_to_stays_shared_in_a_fork() -> None:
    case = _Case()
    result = _array(case.lending)
    unknown = _array(case.lending)
    assert in_child(lambda: True)
    case.seen_by_other(unknown)[:] = 3
    assert unknown[-1] == 3, "nobody has said yet who writes to it"
    case.lending.pool.settle((1,), 5)
    case.reached = 4
    assert in_child(lambda: True)
    case.seen_by_other(result)[:] = 3
    assert int(result.sum()) == 3 * MIB
    case.reached = 5
    assert in_child(lambda: True)
    result[0] = 8
    assert case.seen_by_other(result)[0] != 8
    assert int(result.sum()) == 3 * MIB + 5


def test_results_leave_room_for_tensors_and_give_way_to_them() -> None:
    case = _Case()
    held = [_array(case.lending, 4 * MIB) for _ in range(6)]
    inside = [0 <= array.ctypes.data - case.arena.base < case.arena.nbytes for array in held]
    assert inside == [True, True, False, False, False, False]
    assert len(case.arena.allocate(4 * MIB)) == 4 * MIB
    held.clear()
    gc.collect()
    assert case.lending.pool.free_bytes == 24 * MIB
    kept = case.arena.allocate(12 * MIB)
    assert case.lending.pool.free_bytes == 0
    with pytest.raises(MemoryError):
        case.arena.allocate(12 * MIB)
    del kept


def test_what_is_lent_outlives_the_arena_and_then_goes_back_to_the_system() -> None:
    case = _Case()
    kept, second = [_array(case.lending)], _array(case.lending)
    kept[0][:], second[:] = 1, 2
    shown = case.seen_by_other(kept[0])
    case.lending.close()
    case.arena.close()
    assert case.lending.pool.take(MIB) is None
    assert in_child(lambda: int(kept[0].sum()) == MIB)
    kept.clear()
    gc.collect()
    assert not shown.any(), "its pages are gone"
    assert int(second.sum()) == 2 * MIB


def _staged_rounds() -> list[int]:
    from horovod import context

    staging: Any = context.engine().transport.staging  # type: ignore[attr-defined]
    found: list[int] = []
    for name in ("rounds", "exchange"):
        usual = getattr(staging, name)
        setattr(staging, name, lambda *args, usual=usual, **more: (found.append(1), usual(*args, **more))[1])
    return found


def _check(rank: int, size: int, turn: int) -> None:
    import torch

    import horovod.torch as hvd

    total = sum(other + 1.0 + turn for other in range(size))
    # The last rank has nothing to give.
    mine = torch.full((1000 * (size - 1 - rank) + 400_000 * (rank == 0), 2), rank + 1.0 + turn)
    one, two = hvd.grouped_allgather([mine, mine[:3].double()], name="gathered")
    lengths = [1000 * (size - 1 - other) + 400_000 * (other == 0) for other in range(size)]
    assert one.shape == (sum(lengths), 2)
    assert two.dtype == torch.float64
    for part, other in zip(one.split(lengths), range(size), strict=True):
        assert bool((part == other + 1.0 + turn).all())
    # Rank 0 gets nothing, and rank 1 gives nothing.
    splits = [0 if to == 0 or rank == 1 else 100_000 * to + rank for to in range(size)]
    rows = torch.cat([torch.full((count, 3), 10.0 * rank + to) for to, count in enumerate(splits)])
    found, received = hvd.alltoall(rows, splits=splits, name="exchanged")
    expected = [0 if rank == 0 or other == 1 else 100_000 * rank + other for other in range(size)]
    assert received.tolist() == expected
    for part, other in zip(found.split(expected), range(size), strict=True):
        assert bool((part == 10.0 * other + rank).all())
    given = torch.arange(300_001, dtype=torch.float64) * (rank + 1.0 + turn)
    assert bool((hvd.allreduce(given, op=hvd.Sum, name="sum") == torch.arange(300_001) * total).all())
    parts = hvd.grouped_allreduce([given[:5], given, given[:0], given.bfloat16()], op=hvd.Max, name="largest")
    largest = torch.arange(300_001, dtype=torch.float64) * (size + turn)
    assert [part.dtype for part in parts] == [torch.float64] * 3 + [torch.bfloat16]
    assert bool((parts[0] == largest[:5]).all())
    assert bool((parts[1] == largest).all())
    assert bool((parts[3] == (torch.arange(300_001) * (size + turn)).bfloat16()).all()) or size > 2
    # Rank 0 wants its own back.
    same = (
        hvd.allreduce_(given, op=hvd.Min, name="mixed") if rank == 0 else hvd.allreduce(given, op=hvd.Min, name="mixed")
    )
    assert bool((same == torch.arange(300_001) * (1.0 + turn)).all())


def _collectives() -> None:
    import torch

    import horovod.torch as hvd
    from horovod import context
    from horovod.torch.runtime import comm
    from horovod.transports.results import private_region

    rank, size = hvd.rank(), hvd.size()
    transport: Any = context.engine().transport
    for turn in range(3):
        _check(rank, size, turn)
    staged = _staged_rounds()
    given = torch.ones(size * 200_000)
    for _ in range(3):
        hvd.allgather(given, name="even")
        hvd.alltoall(given.view(size * 50_000, 4), name="even")
        hvd.allreduce(given, name="even")
        whole = hvd.zeros(size * len(given))
        part = whole[rank * len(given) : (rank + 1) * len(given)]
        part.fill_(rank + 1.0)
        comm.synchronize(comm.allgather_into_async(whole, part, name="into"))
        assert float(whole.sum()) == len(given) * size * (size + 1) / 2
    assert not staged
    # The arena of one rank is full: all do as that one must.
    make = transport.results._make
    transport.results.shrink()
    hvd.barrier()
    if rank == size - 1:
        transport.results._make = private_region
    for turn in range(2):
        _check(rank, size, turn)
    assert staged
    transport.results._make = make


def _in_place_after_a_fork() -> None:
    import torch

    import horovod.torch as hvd

    rank = hvd.rank()
    for turn in range(3):
        result = hvd.allgather(torch.full((200_000,), rank + 1.0), name="result")
        handle = hvd.allreduce_async_(result, op=hvd.Sum, name="at once")
        assert in_child(lambda: True)
        assert float(hvd.synchronize(handle).sum()) == 2 * 200_000 * 3, turn
        assert float(hvd.allreduce_(result, op=hvd.Sum, name="afterwards").sum()) == 4 * 200_000 * 3, turn
        assert float(hvd.reducescatter(result, op=hvd.Sum, name="scattered").sum()) == 8 * 200_000 * (rank + 1), turn


def test_a_result_can_be_reduced_in_place_before_and_after_a_fork() -> None:
    run_ranks(2, _in_place_after_a_fork)


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_writes_its_part_of_every_result(size: int) -> None:
    run_ranks(size, _collectives)
