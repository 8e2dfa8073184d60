"""However a job of several hosts ends, nothing of it is left on any of them, and the first cause is named first."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator

import pytest
from launching import HOROVODRUN, Running, started
from namespaces import Cluster

pytestmark = pytest.mark.slow

# Each rank has a daemon, in a session of its own.
RANK = "setsid sleep 1000 & echo 'up '; wait"


class Job:
    """A job of ranks 0 and 1 on a, 2 on login, 3 on another host; knows its processes on a and that host."""

    def __init__(self, cluster: Cluster, running: Running, far: str, before: set[int]) -> None:
        self.cluster, self.running = cluster, running
        found = {**cluster.processes("a"), **cluster.processes(far)}
        self.far = {pid: text for pid, text in cluster.processes(far).items() if pid not in before}
        # sshd's own process may wait for the network after what it served has ended.
        ours = {pid: text for pid, text in found.items() if pid not in before and not text.startswith("sshd")}
        self.pidfds = {os.pidfd_open(pid): f"{pid} {text}" for pid, text in ours.items()}

    def kill(self, what: str) -> None:
        """Kill the first process on the other host whose command line has these words."""
        os.kill(next(pid for pid, text in self.far.items() if what in text), signal.SIGKILL)

    def left(self, timeout_s: float = 120.0) -> list[str]:
        """Processes that do not end."""
        poll = select.poll()
        waiting = dict(self.pidfds)
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        while waiting and (ended := poll.poll(timeout_s * 1000)):
            for fd, _ in ended:
                poll.unregister(fd)
                del waiting[fd]
        return list(waiting.values())


@pytest.fixture
def job(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Job]:
    far = getattr(request, "param", "b")
    before = {*cluster.processes("a"), *cluster.processes(far)}
    program = cluster.machines["login"].command(*HOROVODRUN)
    with started("-np", "4", "-H", f"a:2,localhost:1,{far}:1", "sh", "-c", RANK, ranks=4, program=program) as running:
        job = Job(cluster, running, far, before)
        try:
            yield job
        finally:
            for fd in job.pidfds:
                os.close(fd)


LOST = "host b was lost with rank 3: "
FAULTS: dict[str, tuple[Callable[[Job], None], int, str]] = {
    "a rank": (lambda job: job.kill("sh -c setsid"), 137, "rank 3 on b (pid "),
    "Ctrl-C": (lambda job: job.running.process.send_signal(signal.SIGINT), 130, "SIGINT received; ended 4 of 4 ranks"),
    "kill -9 of horovodrun": (lambda job: job.running.process.kill(), -9, ""),
    "the connection": (lambda job: job.kill("sshd: root@notty"), 1, LOST + "the connection ended"),
    "the agent": (lambda job: job.kill("horovod.launch.agent"), 1, LOST + "the connection ended"),
    "the keeper": (lambda job: job.kill("keeper.py"), 1, LOST),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_left_after(job: Job, fault: str) -> None:
    act, code, said = FAULTS[fault]
    act(job)
    assert job.left() == []
    ended = job.running.end()
    assert ended.code == code
    assert said in ended.err.partition("\n")[0]


def test_nothing_is_left_after_a_cable_was_pulled(job: Job) -> None:
    job.cluster.cut("b")
    try:
        assert job.left() == []
        ended = job.running.end()
    finally:
        job.cluster.mend("b")
    assert ended.code == 1
    # The kernel may tell ssh that there is no route, before the silence has lasted long enough.
    assert LOST + "no sign of life for 5 s" in ended.err or LOST + "the connection ended" in ended.err


@pytest.mark.parametrize("job", ["c"], indirect=True)
def test_nothing_is_left_after_a_host_has_crashed(job: Job) -> None:
    job.cluster.crash("c")  # for good
    assert job.left() == []
    ended = job.running.end()
    assert ended.code == 1
    assert "host c was lost with rank 3: " in ended.err.partition("\n")[0]
