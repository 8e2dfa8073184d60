"""A job service in a process of its own ends with the rank that has started it, and there is one for a job."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from meetings import KEY, LONG_S

from horovod.rendezvous.client import JobStore, endpoints_of, service_secret
from horovod.world import Meeting, World

pytestmark = pytest.mark.slow

RANK = """
import json, os, sys
from horovod.rendezvous.hosting import host_service
from horovod.world import Meeting, World
meeting = Meeting("hosts", ("localhost",), sys.argv[1], True)
endpoints = host_service(World(0, 2, 0, 1, 0, 2, "a", "torchrun", "job", b"k" * 16, meeting))
if os.fork() == 0:  # such as a data loader, which inherits all descriptors
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdin.readline()
    os._exit(0)
print(json.dumps(endpoints), flush=True)
sys.stdin.readline()
"""


def _rank(run: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RANK, run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip


@pytest.mark.parametrize("end", ["exit", "kill -9"])
def test_a_service_ends_with_its_rank(end: str) -> None:
    run = f"{os.getpid()} {end}"
    with _rank(run) as rank:
        assert rank.stdin is not None and rank.stdout is not None
        endpoints = json.loads(rank.stdout.readline())
        children = Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()
        services = [pid for pid in map(int, children) if b"hosting" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        pid_fd = os.pidfd_open(services[0])
        with _rank(run) as second:
            assert json.loads(second.stdout.readline()) == [], "a second service of the job"
        # Debian writes 127.0.1.1 and the host's name into /etc/hosts.
        world = World(0, 2, 0, 1, 0, 2, "a", "torchrun", "job", KEY, Meeting("hosts", ("127.0.1.1",), run, True))
        JobStore(service_secret(world), lambda: endpoints_of(world), timeout_s=LONG_S).close()
        if end == "exit":
            rank.stdin.close()
        else:
            rank.send_signal(signal.SIGKILL)
        assert select.select([pid_fd], [], [], LONG_S)[0]
        os.close(pid_fd)
    with pytest.raises(TimeoutError):
        JobStore(KEY, lambda: endpoints, timeout_s=0.2)
