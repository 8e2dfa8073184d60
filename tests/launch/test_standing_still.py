"""Processes that are stopped; a horovodrun that is stopped while it checks hosts, and goes on, blames no host."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from types import SimpleNamespace
from typing import Any

import pytest

from horovod._version import __version__
from horovod.launch import agent as agents
from horovod.launch import frames
from horovod.launch.remote import RemoteJob
from horovod.launch.ssh import Access
from horovod.world import is_stopped

STOPPED_S = 100.0
HELLO = frames.AgentHello(__version__, 1, "machine")


class Agent:
    """Both ends of the connection with a host whose agent says what the test tells it to."""

    def __init__(self, host: str, access: Access) -> None:
        self.host, self.stderr = host, ""
        ours, self._theirs = os.pipe()
        self._hears, to_it = os.pipe()
        self.wire = frames.AgentWire(ours, to_it, is_launcher=True)
        self.far = frames.AgentWire(self._hears, self._theirs, is_launcher=False)
        self.fds = [ours, self._theirs, self._hears, to_it]

    def say(self, *words: Any) -> None:
        for word in words:
            self.far.send(word)

    def end(self) -> None:
        os.close(self._theirs)
        self.fds.remove(self._theirs)

    def why(self) -> str:
        return f"{self.host} is blamed"

    def hang_up(self) -> None: ...

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []


@pytest.mark.parametrize("stood_s", [0.0, STOPPED_S])
def test_a_host_whose_agent_gave_up_is_lost_by_the_launcher(stood_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    agent: Any = Agent("far", Access("python"))
    plan: Any = SimpleNamespace(hostname="far")
    job = RemoteJob(plan, agent)
    agent.say(HELLO)
    agent.end()
    at = agent.wire.alive_at + stood_s
    monkeypatch.setattr(frames, "time", SimpleNamespace(monotonic=lambda: at))
    told = [*job.news()]  # what had come before
    job.tend()
    told += [*job.news()]
    agent.close()
    told_of_stop = "(horovodrun itself did not run for 100 s, so that its agent took it for lost)"
    assert told == [{"lost": f"the connection ended {told_of_stop}" if stood_s else "the connection ended"}]


def test_an_agent_waits_longer_for_the_launcher_before_it_has_started_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher may import, or pickle a function, for seconds, and shows no sign of life meanwhile."""
    far = Agent("far", Access("python"))
    agent = agents.Agent(far.far)
    now = time.monotonic()
    for waited_s in range(1, 200):
        monkeypatch.setattr(frames, "time", SimpleNamespace(monotonic=lambda at=now + waited_s: at))
        far.far.show_life()
        if agent.is_deserted:
            break
    far.close()
    assert waited_s >= frames.SILENCE_BEFORE_START_S > 100


def test_a_stopped_process_is_known_and_one_that_has_ended_is_not() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        assert is_stopped(process.pid)
        process.kill()
    assert not is_stopped(process.pid)
