"""Sleeping on a word of shared memory."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest

from horovod.transports.shm import futex

pytestmark = pytest.mark.skipif(not futex.IS_SUPPORTED, reason="futexes are promised on Linux only")

LONG_S = 30.0


class Sleeper:
    """A thread that sleeps on a word until it is woken."""

    def __init__(self, word: ctypes.c_uint32, channel: int, timeout_s: float = LONG_S) -> None:
        self.woken: bool | None = None
        self._thread = threading.Thread(target=self._sleep, args=(word, channel, timeout_s))
        self._thread.start()

    def _sleep(self, word: ctypes.c_uint32, channel: int, timeout_s: float) -> None:
        self.woken = futex.wait(ctypes.addressof(word), word.value, timeout_s, channel)

    def join(self, meanwhile: Callable[[], None]) -> None:
        """Do something again and again until the sleeper is up: it may not sleep yet at the first time."""
        while self._thread.is_alive():
            meanwhile()
            self._thread.join(0.002)


def test_a_sleeper_is_woken() -> None:
    word = ctypes.c_uint32(7)
    sleeper = Sleeper(word, 1)
    sleeper.join(lambda: futex.wake(ctypes.addressof(word), 1))
    assert sleeper.woken is True


def test_all_on_the_channel_are_woken() -> None:
    word = ctypes.c_uint32(0)
    sleepers = [Sleeper(word, 1), Sleeper(word, 3), Sleeper(word, 2)]
    for sleeper in sleepers:
        sleeper.join(lambda: futex.wake(ctypes.addressof(word), 3))
    assert [sleeper.woken for sleeper in sleepers] == [True] * 3


def test_only_a_shared_bit_wakes() -> None:
    word = ctypes.c_uint32(0)
    sleeper = Sleeper(word, 2, timeout_s=0.1)
    sleeper.join(lambda: futex.wake(ctypes.addressof(word), 1))
    assert sleeper.woken is False
    sleeper = Sleeper(word, 2)
    sleeper.join(lambda: futex.wake(ctypes.addressof(word), 3))
    assert sleeper.woken is True


def test_another_word_wakes_nobody() -> None:
    words = (ctypes.c_uint32 * 2)()
    first, second = ctypes.c_uint32.from_buffer(words, 0), ctypes.c_uint32.from_buffer(words, 4)
    sleeper = Sleeper(first, 1, timeout_s=0.1)
    sleeper.join(lambda: futex.wake(ctypes.addressof(second), 1))
    assert sleeper.woken is False


def test_a_changed_word_lets_nobody_sleep() -> None:
    word = ctypes.c_uint32(1)
    assert futex.wait(ctypes.addressof(word), 0, LONG_S, 1) is True


def test_the_largest_word_is_compared_as_it_is() -> None:
    word = ctypes.c_uint32(0xFFFFFFFF)
    assert futex.wait(ctypes.addressof(word), 0xFFFFFFFF, 0.0, 1) is False


@pytest.mark.parametrize("timeout_s", [0.0, 0.01])
def test_time_runs_out(timeout_s: float) -> None:
    word = ctypes.c_uint32(0)
    assert futex.wait(ctypes.addressof(word), 0, timeout_s, 1) is False


def test_waking_nobody_is_fine() -> None:
    word = ctypes.c_uint32(0)
    futex.wake(ctypes.addressof(word), 1)


def test_an_address_that_is_no_futex_is_an_error() -> None:
    words = (ctypes.c_uint32 * 2)()
    with pytest.raises(OSError, match="futex"):
        futex.wait(ctypes.addressof(words) + 1, 0, 0.0, 1)


def test_fence_can_be_called() -> None:
    for _ in range(100):
        futex.fence()
