"""Results to which every rank writes its part: right whatever the parts, and the user's own like any other memory."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pytest
from forking import in_child
from harness import on_ranks
from later import later

from horovod import context
from horovod.transports.shm.arena import HEAP_START, Arena
from horovod.transports.shm.mapping import create_memfd

hvd, torch = later("horovod.torch"), later("torch")

MIB = 1 << 20
Array = np.ndarray[Any, Any]


def _array(arena: Arena, nbytes: int = MIB) -> Array:
    memory = arena.results.take(nbytes)
    assert memory is not None
    return np.ndarray(nbytes, np.uint8, memory)


def _arenas(nbytes: int = HEAP_START + 16 * MIB) -> tuple[Arena, Arena]:
    """Return an arena as its rank has it, and as another one does."""
    fd = create_memfd("horovod-test", nbytes)
    arenas = Arena(fd, nbytes), Arena(fd, nbytes)
    os.close(fd)
    return arenas


def test_results_leave_room_for_tensors_and_give_way_to_them() -> None:
    arena, _ = _arenas()
    held = [arena.results.take(4 * MIB) for _ in range(3)]
    assert [memory is not None for memory in held] == [True, True, False]
    assert len(arena.allocate(4 * MIB)) == 4 * MIB
    held.clear()
    gc.collect()
    assert arena.results.free_bytes == 8 * MIB
    kept = arena.allocate(12 * MIB)
    assert arena.results.free_bytes == 0
    with pytest.raises(MemoryError):
        arena.allocate(12 * MIB)
    del kept


def test_what_is_lent_outlives_the_arena_and_then_goes_back_to_the_system() -> None:
    arena, other = _arenas()
    kept, second = [_array(arena)], _array(arena)
    kept[0][:], second[:] = 1, 2
    shown = np.frombuffer(other.memory, np.uint8, MIB, kept[0].ctypes.data - arena.base)
    arena.close()
    assert arena.results.take(MIB) is None
    assert in_child(lambda: int(kept[0].sum()) == MIB)
    kept.clear()
    gc.collect()
    assert not shown.any(), "its pages are gone"
    assert int(second.sum()) == 2 * MIB


def _staged_rounds() -> list[int]:
    staging: Any = context.engine().transport.staging  # type: ignore[attr-defined]
    found: list[int] = []
    for name in ("rounds", "exchange"):
        usual = getattr(staging, name)
        setattr(staging, name, lambda *args, usual=usual, **more: (found.append(1), usual(*args, **more))[1])
    return found


def _check(rank: int, size: int, turn: int) -> None:
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


@on_ranks(2)
def test_a_result_can_be_reduced_in_place_before_and_after_a_fork() -> None:
    rank = hvd.rank()
    for turn in range(3):
        result = hvd.allgather(torch.full((200_000,), rank + 1.0), name="result")
        handle = hvd.allreduce_async_(result, op=hvd.Sum, name="at once")
        assert in_child(lambda: True)
        assert float(hvd.synchronize(handle).sum()) == 2 * 200_000 * 3, turn
        assert float(hvd.allreduce_(result, op=hvd.Sum, name="afterwards").sum()) == 4 * 200_000 * 3, turn
        assert float(hvd.reducescatter(result, op=hvd.Sum, name="scattered").sum()) == 8 * 200_000 * (rank + 1), turn


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks()
def test_every_rank_writes_its_part_of_every_result() -> None:
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
