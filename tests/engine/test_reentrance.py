"""hvd in signal handlers and from several threads."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from harness import LIMIT_S, Ranks, on_ranks, run_ranks

import horovod.numpy as hvd
from horovod.errors import HorovodInternalError, NotInitializedError, PeerLostError, RequestError
from horovod.transports.shm import futex


def _until(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S / 2
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _handles(what: str) -> list[Any]:
    """Do something in a signal handler, while the main thread waits in the engine; rank 1 comes when it is done."""
    found: list[Any] = []

    def handler(*_: Any) -> None:
        if what == "look":
            found.extend([hvd.rank(), hvd.size(), hvd.stats().in_flight, hvd.is_initialized()])
        else:
            found.append(hvd.allreduce(np.ones(1), name="inner", op=hvd.Sum).tolist())

    if hvd.rank() == 1:
        if what == "collective":
            found.append(hvd.allreduce(np.ones(1), name="inner", op=hvd.Sum).tolist())
        hvd.allreduce(np.ones(1), name="go")
        found.append(hvd.allreduce(np.ones(1), name="outer", op=hvd.Sum).tolist())
        return found
    before = signal.signal(signal.SIGUSR2, handler)
    main = threading.main_thread().ident

    def interrupt() -> None:
        _until(lambda: hvd.stats().in_flight)
        signal.pthread_kill(main or 0, signal.SIGUSR2)
        _until(lambda: found)
        hvd.allreduce(np.ones(1), name="go")

    thread = threading.Thread(target=interrupt)
    thread.start()
    result = hvd.allreduce(np.ones(1), name="outer", op=hvd.Sum)
    thread.join()
    signal.signal(signal.SIGUSR2, before)
    return [*found, result.tolist()]


def test_a_collective_in_a_signal_handler_works() -> None:
    assert run_ranks(2, _handles, "collective") == [[[2], [2]]] * 2


def test_who_we_are_and_what_we_do_can_be_asked_in_a_signal_handler() -> None:
    first, second = run_ranks(2, _handles, "look")
    assert second == [[2]]
    assert first == [0, 2, 1, True, [2]]


def _leaves_in_handler(peer_dies: bool) -> str:
    hvd.barrier()
    if hvd.rank() == 1:
        if peer_dies:
            os._exit(3)
        try:
            hvd.allreduce(np.ones(1), name="never")
        except HorovodInternalError as error:
            return str(error)
    signal.signal(signal.SIGUSR2, lambda *_: hvd.shutdown())
    main = threading.main_thread().ident or 0
    threading.Thread(
        target=lambda: (_until(lambda: hvd.stats().in_flight), signal.pthread_kill(main, signal.SIGUSR2))
    ).start()
    try:
        hvd.allreduce(np.ones(1), name="other")
    except HorovodInternalError as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("peer_dies", [False, True])
def test_shutdown_in_a_signal_handler_ends_what_the_thread_waits_for(peer_dies: bool) -> None:
    first, second = Ranks(2, _leaves_in_handler, (peer_dies,)).outcomes()
    assert first.value in ({"NotInitializedError"} if not peer_dies else {"NotInitializedError", "PeerLostError"})
    if not peer_dies:
        assert "has left the job" in second.value


def test_a_fence_inside_a_fence() -> None:
    """A signal handler may come anywhere, also where this thread holds what a fence is made of."""
    if not futex.is_strongly_ordered:
        return
    cells = dict(zip(futex.fence.__code__.co_freevars, futex.fence.__closure__ or (), strict=True))
    acquire, release = cells["acquire"].cell_contents, cells["release"].cell_contents
    acquire()
    thread = threading.Thread(target=futex.fence, daemon=True)
    thread.start()
    thread.join(LIMIT_S / 4)
    release()
    assert not thread.is_alive()


@on_ranks(1, returns=[0])
def test_shutdown_while_other_threads_work() -> int:
    ended: list[str] = []

    def work(index: int) -> None:
        try:
            for i in range(10_000_000):
                hvd.allreduce(np.ones(1), name=f"thread {index}.{i % 7}")
        except NotInitializedError:
            ended.append("left")
        except BaseException as error:
            ended.append(repr(error))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    _until(lambda: hvd.stats().operations > 300)
    if hvd.size() == 1:
        hvd.shutdown()
    else:
        # All leave together, so that nobody is lost.
        hvd.barrier()
        hvd.shutdown()
    for thread in threads:
        thread.join(LIMIT_S / 4)
        assert not thread.is_alive()
    return sum("left" not in text for text in ended)


@on_ranks(2, returns=[["NotInitializedError"] * 3, []])
def test_who_leaves_is_told_so_in_all_its_threads() -> list[str]:
    errors: list[str] = []
    hvd.barrier()
    if hvd.rank() == 1:
        with pytest.raises(PeerLostError, match="rank 0"):
            hvd.allreduce(np.ones(1), name="stay")
    else:
        started = threading.Barrier(4)

        def wait(index: int) -> None:
            handle = hvd.allreduce_async(np.ones(1), name=f"alone {index}")
            started.wait()
            try:
                hvd.synchronize(handle)
            except Exception as error:
                errors.append(type(error).__name__)

        threads = [threading.Thread(target=wait, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        started.wait()
        hvd.shutdown()
        for thread in threads:
            thread.join(LIMIT_S / 4)
    return errors


@pytest.mark.slow
@on_ranks(1, returns=[60_000])
def test_sixty_thousand_handles_are_not_looked_through_for_each_submission(count: int = 60_000) -> int:
    """If they were, this would take minutes."""
    one = np.ones(1)
    handles = [hvd.allreduce_async(one, name=f"n{i}") for i in range(count)]
    for handle in handles:
        hvd.synchronize(handle)
    return hvd.stats().operations


@pytest.mark.parametrize("in_thread", [False, True])
@on_ranks(2)
def test_a_finalizer_that_runs_in_the_middle_of_the_work_is_refused_to_wait(in_thread: bool) -> None:
    """The last user of a tensor goes while its rank executes the operation on it."""
    told: list[str] = []
    later: list[int] = []

    def last(_: Any) -> None:
        later.append(hvd.allreduce_async(np.ones(1), name="later", op=hvd.Sum))
        for name in ("now", "later"):
            try:
                hvd.allreduce(np.ones(1), name="now") if name == "now" else hvd.synchronize(later[0])
            except RequestError as error:
                told.append(str(error))

    def act() -> None:
        memory: Any = (ctypes.c_char * 32)()
        callback = weakref.ref(memory, last)
        handle = hvd.allreduce_async(np.frombuffer(memory, "float64"), name="outer", op=hvd.Sum)
        del memory
        hvd.synchronize(handle)
        assert callback() is None

    if in_thread:
        thread = threading.Thread(target=act)
        thread.start()
        thread.join(LIMIT_S / 2)
        assert not thread.is_alive()
    else:
        act()
    assert hvd.synchronize(later[0]).tolist() == [2]
    hvd.barrier()
    assert hvd.allreduce(np.ones(1), name="now", op=hvd.Sum).tolist() == [2]
    assert len(told) == 2
    assert all("finalizer" in text and "_async" in text for text in told)
