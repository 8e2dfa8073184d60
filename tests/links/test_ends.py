"""The end of a process wakes those who watch it, and its exit code is known before its parent has collected it."""

from __future__ import annotations

import os
import threading

import pytest
from harness import LIMIT_S

from horovod.links.shm.peers import EndWatch, _code_of_zombie


def _child() -> tuple[int, int, int]:
    """Return the process id and a pidfd of a child that ends with code 7 as soon as it reads from the pipe."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        os.close(writer)
        os.read(reader, 1)
        os._exit(7)
    os.close(reader)
    return pid, os.pidfd_open(pid), writer


def test_each_end_is_reported_once() -> None:
    children = [_child() for _ in range(2)]
    ended = threading.Semaphore(0)
    watch = EndWatch([fd for _, fd, _ in children], ended.release)
    for pid, _, writer in children:
        assert not ended.acquire(blocking=False)
        os.write(writer, b"x")
        assert ended.acquire(timeout=LIMIT_S)
        os.waitpid(pid, 0)
    watch.close()
    assert not ended.acquire(blocking=False)
    for _, fd, writer in children:
        os.close(fd)
        os.close(writer)


@pytest.mark.parametrize("is_collected", [False, True])
def test_the_code_of_a_process_that_nobody_has_collected(is_collected: bool) -> None:
    pid, fd, writer = _child()
    os.write(writer, b"x")
    os.waitid(os.P_PID, pid, os.WEXITED | (0 if is_collected else os.WNOWAIT))
    code = _code_of_zombie(fd)
    if not is_collected:
        os.waitpid(pid, 0)
    os.close(fd)
    os.close(writer)
    assert os.waitstatus_to_exitcode(code) == (0 if is_collected else 7)
