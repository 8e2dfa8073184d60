"""The arena's allocator, and the arena over it."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.transports.shm.arena import INLINE_BYTES, STAGING_BYTES, Arena, Heap
from horovod.transports.shm.mapping import create_memfd

PAGE = 4096
FRONT = INLINE_BYTES + STAGING_BYTES
END = 64 * PAGE

steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 12 * PAGE)),
        st.tuples(st.just("give"), st.integers(0, 1000)),
    ),
    max_size=60,
)


def _pages(nbytes: int) -> int:
    return max(1, -(-nbytes // PAGE)) * PAGE


@settings(max_examples=150)
@given(steps=steps)
def test_ranges_never_overlap_and_everything_given_back_is_one_again(steps: list[tuple[str, int]]) -> None:
    heap = Heap(PAGE, END)
    taken: list[tuple[int, int]] = []
    for step, number in steps:
        if step == "take":
            try:
                offset = heap.take(number)
            except MemoryError:
                free = sorted([*taken, (END, 0)])
                ends = [PAGE, *(start + _pages(nbytes) for start, nbytes in free[:-1])]
                assert max(start - end for (start, _), end in zip(free, ends, strict=True)) < _pages(number)
                continue
            taken.append((offset, number))
        elif taken:
            heap.give(*taken.pop(number % len(taken)))
        ordered = sorted(taken)
        assert all(offset % PAGE == 0 for offset, _ in ordered)
        ends = [PAGE, *(offset + _pages(nbytes) for offset, nbytes in ordered)]
        assert all(end <= start for end, start in zip(ends, [*(offset for offset, _ in ordered), END], strict=True))
    for offset, nbytes in taken:
        heap.give(offset, nbytes)
    assert heap.take(END - PAGE) == PAGE


def test_a_full_heap_names_the_knob() -> None:
    heap = Heap(0, 2 * PAGE)
    heap.take(PAGE)
    with pytest.raises(MemoryError, match="HOROVOD_ARENA_BYTES"):
        heap.take(PAGE + 1)


@pytest.fixture
def arena() -> Iterator[Arena]:
    fd = create_memfd("horovod-test", FRONT + 16 * PAGE)
    arena = Arena(fd, FRONT + 16 * PAGE)
    os.close(fd)
    yield arena
    gc.collect()
    arena.close()


def test_a_block_is_freed_with_its_last_user(arena: Arena) -> None:
    block = arena.allocate(16 * PAGE)
    view = np.frombuffer(block, dtype=np.uint8)
    view[:] = 7
    del block
    with pytest.raises(MemoryError):
        arena.allocate(1)
    part = view[100:200]
    del view
    with pytest.raises(MemoryError):
        arena.allocate(1)
    del part
    fresh = np.frombuffer(arena.allocate(16 * PAGE), dtype=np.uint8)
    assert not fresh.any(), "freed pages come back as zeros"
    del fresh


def test_offsets_name_the_bytes_of_a_block(arena: Arena) -> None:
    block = np.frombuffer(arena.allocate(PAGE), dtype=np.float32)
    offset = arena.offset_of(block.ctypes.data)
    assert offset >= FRONT
    assert arena.offset_of(block[3:].ctypes.data) == offset + 12
    assert arena.offset_of(np.zeros(4).ctypes.data) == -1
    block[:] = 5
    assert arena.view("numpy", offset, "float32", (2, 2)).tolist() == [[5, 5], [5, 5]]
    again = [arena.view("numpy", offset, "float32", (2, 2)) for _ in range(2)]
    assert again[0] is again[1]
    del block


def test_a_tensor_outlives_the_arena() -> None:
    fd = create_memfd("horovod-test", FRONT + PAGE)
    arena = Arena(fd, FRONT + PAGE)
    os.close(fd)
    block = np.frombuffer(arena.allocate(PAGE), dtype=np.uint8)
    block[:] = 9
    arena.close()
    assert block.sum() == 9 * PAGE
    del block


def test_a_closed_arena_that_something_refers_to_does_not_keep_its_memory() -> None:
    fd = create_memfd("horovod-test", FRONT + 2 * PAGE)
    arena = Arena(fd, FRONT + 2 * PAGE)
    os.close(fd)
    memory = weakref.ref(arena.memory)
    first, second = (np.frombuffer(arena.allocate(PAGE), dtype=np.uint8) for _ in range(2))
    arena.close()
    del first
    assert memory() is not None and not second.any()
    del second
    assert memory() is None
