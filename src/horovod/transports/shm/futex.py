"""Sleep on, and wake, a word of shared memory; and a memory fence. Through ctypes; sleeping drops the GIL.

Source: futex(2), membarrier(2).
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
import threading
from collections.abc import Callable

__all__ = ["IS_SUPPORTED", "fence", "is_strongly_ordered", "wait", "wake"]

_SYSCALLS = {"x86_64": (202, 324), "aarch64": (98, 283)}
_FUTEX_WAIT_BITSET = 9
_FUTEX_WAKE_BITSET = 10
_MEMBARRIER_PRIVATE_EXPEDITED = 1 << 3
_MEMBARRIER_REGISTER_PRIVATE_EXPEDITED = 1 << 4

_machine = platform.machine()
IS_SUPPORTED = sys.platform == "linux" and _machine in _SYSCALLS and sys.byteorder == "little"
is_strongly_ordered = _machine == "x86_64"


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
# A wake-up takes a microsecond. If it released the GIL, getting it back could cost the switch interval of 5 ms.
_quick_syscall = ctypes.PyDLL(None).syscall
_quick_syscall.restype = ctypes.c_long
_clock_gettime = _libc.clock_gettime
_FUTEX, _MEMBARRIER = _SYSCALLS.get(_machine, (0, 0))
_ANYONE = ctypes.c_int(0x7FFFFFFF)
_WAIT = ctypes.c_int(_FUTEX_WAIT_BITSET)
_WAKE = ctypes.c_int(_FUTEX_WAKE_BITSET)
_NUMBER = ctypes.c_long(_FUTEX)
_NULL = ctypes.c_void_p(None)
_CLOCK_MONOTONIC = ctypes.c_int(1)


def wait(address: int, expected: int, timeout_s: float, channel: int) -> bool:
    """Sleep until ``wake`` on the same address, of an aligned 32-bit word, and channel, unless the word is no longer
    ``expected``. Only wakers that share a bit of ``channel`` wake this sleeper. Return False when the time ran out;
    True otherwise (woken, changed word, or a signal).

    Raises:
        OSError: the address is not a futex.
    """
    deadline = _Timespec()
    _clock_gettime(_CLOCK_MONOTONIC, ctypes.byref(deadline))
    total = deadline.nanoseconds + int(timeout_s * 1e9)
    deadline.seconds += total // 1_000_000_000
    deadline.nanoseconds = total % 1_000_000_000
    status = _syscall(
        _NUMBER,
        ctypes.c_void_p(address),
        _WAIT,
        ctypes.c_uint32(expected & 0xFFFFFFFF),
        ctypes.byref(deadline),
        _NULL,
        ctypes.c_uint32(channel),
    )
    if status == 0:
        return True
    error = ctypes.get_errno()
    if error == errno.ETIMEDOUT:
        return False
    if error in (errno.EAGAIN, errno.EINTR):
        return True
    raise OSError(error, "futex wait")


def wake(address: int, channel: int) -> None:
    """Wake all threads that sleep on ``address`` with a bit of ``channel``."""
    _quick_syscall(_NUMBER, ctypes.c_void_p(address), _WAKE, _ANYONE, _NULL, _NULL, ctypes.c_uint32(channel))


def _fence_by_lock() -> Callable[[], None]:
    # Taking an uncontended lock is a locked instruction, which on x86-64 drains the store buffer.
    lock = threading.Lock()
    acquire, release = lock.acquire, lock.release

    def fence() -> None:
        if acquire(False):
            release()
        else:
            # Another thread fences, or a signal handler has interrupted this one, which then must not wait for itself.
            threading.Lock().acquire(False)

    return fence


def _fence_by_membarrier() -> Callable[[], None]:
    number = ctypes.c_long(_MEMBARRIER)
    _syscall(number, ctypes.c_int(_MEMBARRIER_REGISTER_PRIVATE_EXPEDITED), ctypes.c_int(0), ctypes.c_int(0))
    command, zero = ctypes.c_int(_MEMBARRIER_PRIVATE_EXPEDITED), ctypes.c_int(0)

    def fence() -> None:
        _syscall(number, command, zero, zero)

    return fence


#: Orders every earlier load and store of this thread before every later one.
fence: Callable[[], None] = _fence_by_lock() if is_strongly_ordered or not IS_SUPPORTED else _fence_by_membarrier()
