"""An exception at any line of a call finds it in flight or withdrawn, and the job goes on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from harness import LIMIT_S, on_ranks, run_ranks
from injection import Boom, at_line

import horovod.numpy as hvd
from horovod import context

#: Which ranks are interrupted, of two.
WHO = [(0,), (1,), (0, 1)]


def _flag(value: bool) -> bool:
    """Tell all ranks whether any of them goes on."""
    return bool(hvd.allreduce(np.array([value], "int64"), op=hvd.Max, name="another")[0])


def _submits(who: tuple[int, ...], named: bool, by_instruction: bool) -> int:
    number, interrupted = 0, hvd.rank() in who
    while True:
        number += 1
        tensor, handle = np.full(3, hvd.rank() + number, "float64"), None
        name = f"x{number % 5}" if named else None
        before = hvd.stats().operations
        raised: list[str] = []
        try:
            if not interrupted:
                handle = hvd.allreduce_async_(tensor, name=name, op=hvd.Sum)
            else:
                with at_line(number, by_instruction) as raised:
                    handle = hvd.allreduce_async_(tensor, name=name, op=hvd.Sum)
        except Boom:
            if hvd.stats().operations == before:
                # It was withdrawn, so this is the first time.
                handle = hvd.allreduce_async_(tensor, name=name, op=hvd.Sum)
        if not raised:
            interrupted = False
        if handle is not None:
            hvd.synchronize(handle)
        # If nobody has the handle, what is submitted next is done after it.
        hvd.barrier()
        while not (tensor == 1 + 2 * number).all():
            assert hvd.stats().in_flight, (number, raised, tensor)
        if not _flag(interrupted):
            return number


@pytest.mark.parametrize("who", WHO, ids=str)
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_a_submission_interrupted_at_any_line(who: tuple[int, ...], named: bool) -> None:
    assert min(run_ranks(2, _submits, who, named, False)) > 20


def test_a_submission_interrupted_at_any_instruction() -> None:
    assert min(run_ranks(2, _submits, (1,), True, True)) > 100


@pytest.mark.parametrize("who", WHO, ids=str)
@pytest.mark.parametrize("how", ["synchronize", "poll"])
@on_ranks(2)
def test_a_wait_interrupted_at_any_line(who: tuple[int, ...], how: str) -> None:
    number, interrupted = 0, hvd.rank() in who
    while True:
        number += 1
        tensor = np.full(3, hvd.rank() + number, "float64")
        handle = hvd.allreduce_async_(tensor, name="x", op=hvd.Sum)
        raised: list[str] = []
        wait = hvd.poll if how == "poll" else hvd.synchronize
        try:
            if interrupted:
                with at_line(number) as raised:
                    wait(handle)
        except Boom:
            pass
        if not raised:
            interrupted = False
        hvd.synchronize(handle)
        np.testing.assert_array_equal(tensor, np.full(3, 1 + 2 * number), str(raised))
        if not _flag(interrupted):
            break
    assert number > 5


@pytest.mark.parametrize("who", WHO, ids=str)
@on_ranks(2)
def test_a_synchronous_call_interrupted_at_any_line(who: tuple[int, ...]) -> None:
    number, interrupted = 0, hvd.rank() in who
    while True:
        number += 1
        tensor = np.full(3, hvd.rank() + number, "float64")
        before = hvd.stats().operations
        raised: list[str] = []
        try:
            if interrupted:
                with at_line(number) as raised:
                    hvd.allreduce_(tensor, name="x", op=hvd.Sum)
        except Boom:
            pass
        if hvd.stats().operations == before:
            hvd.allreduce_(tensor, name="x", op=hvd.Sum)
        if not raised:
            interrupted = False
        hvd.barrier()
        np.testing.assert_array_equal(tensor, np.full(3, 1 + 2 * number), str(raised))
        if not _flag(interrupted):
            break
    assert number > 20


@pytest.mark.parametrize("who", WHO, ids=str)
@on_ranks(2, init=False)
def test_leaving_interrupted_at_any_line(who: tuple[int, ...]) -> None:
    number, interrupted = 0, True
    while True:
        number += 1
        raised: list[str] = []
        hvd.init()
        assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [2, 2]
        interrupted = _flag(interrupted and hvd.rank() in who)
        if not interrupted:
            break
        try:
            with at_line(number if hvd.rank() in who else 0) as raised:
                hvd.shutdown()
        except Boom:
            hvd.shutdown()
        interrupted = bool(raised)
        assert not hvd.is_initialized()
    assert number > 10


def _alarmed(kind: type[BaseException]) -> int:
    def handler(*_: Any) -> None:
        raise kind

    signal.signal(signal.SIGALRM, handler)
    chance = random.Random(hvd.rank())
    interrupted = 0
    try:
        for i in range(150):
            tensor = np.full(70_000 if i % 3 else 3, float(hvd.rank()))
            before = hvd.stats().operations
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 2e-3))
                hvd.allreduce_(tensor, name="x", op=hvd.Sum)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except kind:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if hvd.stats().operations == before:
                hvd.allreduce_(tensor, name="x", op=hvd.Sum)
            hvd.barrier()
            assert (tensor == 1).all()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return interrupted


class Alarm(Exception):
    pass


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Alarm])
def test_signal_handlers_that_raise(kind: type[BaseException]) -> None:
    assert sum(run_ranks(2, _alarmed, kind)) > 0


@contextlib.contextmanager
def _sending(number: int, seed: int) -> Iterator[tuple[threading.Semaphore, threading.Event]]:
    """Send a signal to this process within a millisecond of each release of what this yields; and what never comes."""
    chance = random.Random(seed)
    go, is_over = threading.Semaphore(0), threading.Event()

    def send() -> None:
        while go.acquire() and not is_over.is_set():
            is_over.wait(chance.uniform(0, 1e-3))
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield go, is_over
    finally:
        is_over.set()
        go.release()
        thread.join()


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@on_ranks(2)
def test_ctrl_c_waits_for_the_work_in_hand(large: bool) -> None:
    """Ctrl-C at any moment while the main thread does the engine's work itself; exactly one each time."""
    with _sending(signal.SIGINT, hvd.rank()) as (go, is_over):
        for _ in range(60):
            tensor = np.full(300_000 if large else 3, float(hvd.rank()))
            before = hvd.stats().operations
            try:
                go.release()
                hvd.allreduce_(tensor, name="x", op=hvd.Sum)
                while not is_over.wait(0.01):
                    pass  # a signal that comes just before a thread blocks does not wake it
            except KeyboardInterrupt:
                pass
            if hvd.stats().operations == before:
                hvd.allreduce_(tensor, name="x", op=hvd.Sum)
            hvd.barrier()
            assert (tensor == 1).all()


@pytest.mark.parametrize(("number", "raises"), [(signal.SIGCHLD, False), (signal.SIGUSR2, True)])
@on_ranks(2)
def test_handlers_of_the_script_wait_for_the_work_in_hand(number: int, raises: bool) -> None:
    """A signal at any moment of a call, exactly one each time; whenever the script looks, its own handler is there."""
    handled = 0

    def handler(*_: Any) -> None:
        nonlocal handled
        handled += 1
        assert signal.getsignal(number) is handler
        if raises:
            raise Alarm

    usual = signal.signal(number, handler)
    with _sending(number, hvd.rank()) as (go, is_over):
        for turn in range(40):
            tensor = np.full(300_000 if turn % 2 else 3, float(hvd.rank()))
            before = hvd.stats().operations
            try:
                go.release()
                hvd.allreduce_(tensor, name="x", op=hvd.Sum)
                while handled <= turn:
                    is_over.wait(0.01)
            except Alarm:
                pass
            assert handled == turn + 1
            assert signal.getsignal(number) is handler
            if hvd.stats().operations == before:
                hvd.allreduce_(tensor, name="x", op=hvd.Sum)
            hvd.barrier()
            assert (tensor == 1).all()
    signal.signal(number, usual)


class TooLate(Exception):
    pass


@on_ranks(2)
def test_an_exception_that_another_thread_sets_ends_the_wait_only() -> None:
    """A thread of rank 0 waits for rank 1; another one sets an exception in it."""
    tensor, ended = np.full(3, float(hvd.rank())), []

    def wait() -> None:
        try:
            hvd.allreduce_(tensor, name="late", op=hvd.Sum)
        except TooLate:
            ended.append(True)

    if hvd.rank() == 0:
        thread = threading.Thread(target=wait)
        thread.start()
        while thread.ident not in context.engine().waits():
            thread.join(0.001)
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(TooLate))
        thread.join(LIMIT_S / 4)
        assert ended == [True]
    hvd.allreduce(np.ones(1), name="go")
    if hvd.rank() == 1:
        wait()
    hvd.barrier()
    assert hvd.stats().in_flight == 0
    assert (tensor == 1).all(), "it stayed in flight, and is done"
