"""A horovodrun that is stopped while it checks hosts, and goes on: no host is blamed for that time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from horovod._version import __version__
from horovod.errors import LaunchError
from horovod.launch import frames, muster
from horovod.launch.remote import RemoteJob
from horovod.launch.ssh import Access

STOPPED_S = 100.0
HELLO = frames.Hello(__version__, 1, "machine", "far")


class Agent:
    """Both ends of the connection with a host whose agent says what the test tells it to."""

    def __init__(self, host: str, access: Access) -> None:
        self.host, self.stderr = host, ""
        ours, self._theirs = os.pipe()
        self._hears, to_it = os.pipe()
        self.wire = frames.Wire(ours, to_it, is_launcher=True)
        self.far = frames.Wire(self._hears, self._theirs, is_launcher=False)
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


@pytest.fixture
def check(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[Callable[[Agent], None], Callable[[Agent], None]], Any]]:
    """Checks a host; the process is stopped between what its agent says at first, and then."""
    made: list[Agent] = []
    now = [0.0]
    monkeypatch.setattr(muster, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def run(first: Callable[[Agent], None], then: Callable[[Agent], None]) -> Any:
        def begin(host: str, access: Access) -> Agent:
            made.append(Agent(host, access))
            made[0].far.put_mark()
            first(made[0])
            return made[0]

        class Poll:
            """Between one look and the next comes the stop."""

            def __init__(self) -> None:
                self._poll, self._looks = REAL.poll(), 0
                self.register, self.unregister = self._poll.register, self._poll.unregister

            def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
                self._looks += 1
                now[0] += STOPPED_S if self._looks == 2 else 0.0
                if self._looks == 3:
                    then(made[0])
                return self._poll.poll(0)

        monkeypatch.setattr(muster, "Connection", begin)
        monkeypatch.setattr(muster, "select", SimpleNamespace(poll=Poll, POLLIN=REAL.POLLIN))
        return muster.muster(["far"], "", Access("python", timeout_s=30.0), "true", os.defpath)

    yield run
    for agent in made:
        agent.close()


REAL = muster.select


@pytest.mark.parametrize("stood_s", [0.0, STOPPED_S])
def test_a_host_whose_agent_gave_up_is_lost_by_the_launcher(stood_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    agent: Any = Agent("far", Access("python"))
    plan: Any = SimpleNamespace(hostname="far", size=1)
    job = RemoteJob(plan, 0, agent)
    agent.far.put_mark()
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


def test_a_host_that_answers_after_the_stop_is_in_time(check: Any) -> None:
    found = check(lambda agent: None, lambda agent: agent.say(HELLO, frames.Checked([])))
    assert found.hellos == {"far": HELLO}


def test_an_agent_that_gave_up_meanwhile_is_no_fault_of_its_host(check: Any) -> None:
    with pytest.raises(LaunchError, match="far: its agent has given up, for horovodrun itself did not run for 99 s"):
        check(lambda agent: agent.say(HELLO), lambda agent: agent.end())
