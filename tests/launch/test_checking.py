"""Signals while horovodrun still checks hosts; ssh is a stand-in."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from launching import HOROVODRUN, TIMEOUT_S

from horovod.launch import host_checks

#: Says that it runs, and ends when its input does, as ssh and an agent do.
SSH = """#!/bin/sh
exec 7>"$RUNNING"
echo up >&7
exec $WAITING
"""


def _checking(folder: Path, waiting: str = "cat") -> subprocess.Popen[str]:
    """A horovodrun that checks two hosts."""
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "WAITING": waiting}
    environ["RUNNING"] = str(folder / "running")
    return subprocess.Popen(
        [*HOROVODRUN, "-np", "2", "-H", "far-a.invalid,far-b.invalid", "true"],
        env={**os.environ, **environ}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_check_with_a_sentence_and_all_ssh_clients(number: signal.Signals, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "running")
    running = os.open(tmp_path / "running", os.O_RDONLY | os.O_NONBLOCK)
    with _checking(tmp_path) as process, open(running) as clients:
        assert select.select([running], [], [], TIMEOUT_S)[0]
        os.set_blocking(running, True)
        assert all(clients.readline() for _ in range(2))
        process.send_signal(number)
        assert clients.read() == ""  # all of them have ended
        _, said = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, said) == (128 + number, f"horovodrun: {number.name} received; no rank was started\n")


def test_kill_9_leaves_no_ssh_client_behind_that_hears_nothing(tmp_path: Path) -> None:
    """As where the login shell of a host hangs: ssh does not learn that its input has ended."""
    os.mkfifo(tmp_path / "running")
    running = os.open(tmp_path / "running", os.O_RDONLY | os.O_NONBLOCK)
    with _checking(tmp_path, waiting="sleep 600") as process, open(running) as clients:
        assert select.select([running], [], [], TIMEOUT_S)[0]
        os.set_blocking(running, True)
        assert all(clients.readline() for _ in range(2))
        process.kill()
        assert clients.read() == ""


def test_a_host_with_a_problem_does_not_keep_the_check_of_another_one_busy() -> None:
    """Its pipe has ended, which would wake the poll at once, again and again."""
    ends = [os.pipe() for _ in range(2)]
    os.close(ends[0][1])
    ended_at = time.monotonic() + 0.1

    def end() -> None:
        other.is_done = time.monotonic() >= ended_at

    bad: Any = Mock(is_done=True, problems=["no khorovod"], due_at=0.0)
    other: Any = Mock(is_done=False, problems=[], due_at=ended_at, tend=end)
    for check, (reader, _) in zip((bad, other), ends, strict=True):
        check.connection.wire = Mock(incoming=reader, is_closed=False)
    host_checks._await_answers([bad, other], TIMEOUT_S)
    assert 1 <= bad.tend.call_count <= 2
    for fd in (ends[0][0], *ends[1]):
        os.close(fd)
