"""What the kernel says of threads is read right: who can only be woken by others, and who may go on without them."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kernel import tells_what_threads_sleep_in

from horovod.observe.sleepers import only_wait_for_each_other


@contextmanager
def _thread(target: Callable[[], object], end: Callable[[], object]) -> Iterator[int]:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    yield thread.native_id or 0
    end()
    thread.join()


def _others(*looked_at: int) -> set[int]:
    return {int(path.name) for path in Path("/proc/self/task").iterdir()} - set(looked_at)


def _becomes_true(look: Callable[[], bool]) -> bool:
    """Threads get to where they sleep in their own time."""
    return any(look() for _ in range(200))


@pytest.fixture
def kernel_tells() -> bool:
    """Whether there is something to be proven by."""
    return tells_what_threads_sleep_in()


def test_a_thread_that_waits_for_another_one_cannot_go_on_by_itself(kernel_tells: bool) -> None:
    items: queue.SimpleQueue[int] = queue.SimpleQueue()
    with _thread(items.get, lambda: items.put(1)) as number:
        looked = _becomes_true(lambda: only_wait_for_each_other((), {number}, _others(number)))
        assert looked == kernel_tells


def test_a_thread_that_wakes_after_a_time_may_go_on_unless_it_waits_for_an_operation(kernel_tells: bool) -> None:
    done = threading.Event()
    with _thread(lambda: done.wait(1000), done.set) as number:
        # Whoever waits in the engine is seen to sleep first, so that the second look is not one too early.
        assert _becomes_true(lambda: only_wait_for_each_other({number}, (), _others(number))) == kernel_tells
        assert not only_wait_for_each_other((), {number}, _others(number))


def test_a_thread_that_waits_for_something_outside_may_go_on() -> None:
    reader, writer = os.pipe()
    with _thread(lambda: os.read(reader, 1), lambda: os.write(writer, b"x")) as number:
        assert not only_wait_for_each_other((), (), _others(number))
        assert not only_wait_for_each_other((), {number}, _others(number))
    os.close(reader)
    os.close(writer)
