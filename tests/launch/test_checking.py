"""Signals, and settings of ssh, while horovodrun still checks hosts; ssh is a stand-in."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from pathlib import Path

import pytest
from launching import HOROVODRUN, TIMEOUT_S

#: Says that it runs, and ends when its input does, as ssh and an agent do; and what it was told to answer to -G.
SSH = """#!/bin/sh
if [ "$1" = -G ]; then echo "$SETTINGS"; exit; fi
[ -n "$SETTINGS" ] && exit
exec 7>"$RUNNING"
echo up >&7
exec $WAITING
"""


def _checking(folder: Path, settings: str = "", waiting: str = "cat") -> subprocess.Popen[str]:
    """A horovodrun that checks two hosts."""
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "SETTINGS": settings, "WAITING": waiting}
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


def test_a_setting_of_ssh_that_keeps_it_from_talking_is_named(tmp_path: Path) -> None:
    with _checking(tmp_path, "stdinnull yes") as process:
        _, said = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    for host in ("far-a.invalid", "far-b.invalid"):
        assert f"{host}: `StdinNull yes` in the configuration of ssh on this host" in said
