"""Whether the threads of this process wait for each other only, as the kernel tells it.

What runs in a framework, such as a graph of TensorFlow, has threads of which Python knows nothing. A thread that sleeps
on a private futex is woken by a thread of the same process, or when its time is over. So when all threads sleep like
that at one moment, save those that wait in the engine, nothing goes on here until an operation is done. That is a
proof, whatever the threads are there for, but for one thing: threads without Python may sleep for a limited time, as
some in TensorFlow do that look after its input pipelines and compute nothing.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Collection
from pathlib import Path

__all__ = ["only_wait_for_each_other"]

_TASKS = Path("/proc/self/task")
#: Numbers of futex() and clock_nanosleep(), by machine.
_CALLS = {"x86_64": ("202", "230"), "aarch64": ("98", "115")}
_FUTEX, _NANOSLEEP = _CALLS.get(platform.machine(), ("", ""))
#: FUTEX_WAIT and FUTEX_WAIT_BITSET, and what may be added: FUTEX_PRIVATE_FLAG, which must be, and FUTEX_CLOCK_REALTIME.
_WAITS, _PRIVATE, _CLOCK = (0, 9), 128, 256
#: A thread of TensorFlow's looks so often, to the nanosecond, how its input pipelines do, and starts nothing.
_HOUSEKEEPING_S = 30
#: Threads of ZeroMQ and Gloo: a message of another rank sets only those free who wait in the engine.
_MESSENGERS = ("ZMQbg", "gloo_tcp_loop")
#: Longer than a thread waits for Python's lock at a time; and how often to look, as a question wakes several threads.
_PAUSE_S, _TRIES = 0.02, 5
_SWITCHES = re.compile(r"ctxt_switches:\s*(\d+)")


def only_wait_for_each_other(waiting: Collection[int], python: Collection[int], ignored: Collection[int]) -> bool:
    """Return whether all threads of this process sleep at one moment, and can be woken by each other only.

    Args:
        waiting: numbers of threads that wait for operations: these may wake after a time, to look again.
        python: those of threads that may run Python when their time is over: they must sleep without limit.
        ignored: those of threads of which it does not matter what they do.
    """
    if not _FUTEX:
        return False
    for _ in range(_TRIES):
        try:
            if not all(_sleeps(*_call_of(_TASKS / str(number)), may_wake=False) for number in python):
                # To look at all others as well would take whoever runs Python the lock, again and again.
                return False
            before = _asleep(waiting, python, ignored)
            time.sleep(_PAUSE_S)
            # Who slept in both looks, and did not run in between, has slept all the time from the one to the other.
            if before is not None and _asleep(waiting, python, ignored) == before:
                return True
        except (OSError, ValueError):  # a thread has ended, or this kernel does not tell
            continue
    return False


def _asleep(waiting: Collection[int], python: Collection[int], ignored: Collection[int]) -> dict[int, list[str]] | None:
    """Return how often each thread has run; None if one does anything but sleep until another one wakes it."""
    found = {}
    for path in _TASKS.iterdir():
        number = int(path.name)
        if number in ignored:
            continue
        runs = _SWITCHES.findall((path / "status").read_text())
        call, arguments = _call_of(path)
        sleeps = call == _FUTEX if number in waiting else _sleeps(call, arguments, number not in python)
        if not sleeps and (path / "comm").read_text().startswith(_MESSENGERS):
            continue
        if not sleeps or _SWITCHES.findall((path / "status").read_text()) != runs:
            return None
        found[number] = runs
    return found


def _call_of(task: Path) -> tuple[str, list[int]]:
    """Return the system call that a thread is in, as the kernel calls it, and its arguments."""
    call, *arguments = (task / "syscall").read_text().split()
    return call, [int(argument, 16) for argument in arguments]


def _sleeps(call: str, arguments: list[int], may_wake: bool) -> bool:
    if call == _NANOSLEEP:
        return may_wake and _is_housekeeping(arguments[2])
    if call != _FUTEX:
        return False
    _, operation, _, until, *_ = arguments
    return bool(operation & _PRIVATE) and operation & ~(_PRIVATE | _CLOCK) in _WAITS and (may_wake or not until)


def _is_housekeeping(address: int) -> bool:
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        interval = os.pread(memory.fileno(), 16, address)
    return int.from_bytes(interval[:8], "little") == _HOUSEKEEPING_S and not any(interval[8:])
