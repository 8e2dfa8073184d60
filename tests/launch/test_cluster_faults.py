"""Effects of a killed rank, a lost host or a full disk on ranks of other hosts, and their traces."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import HOROVODRUN, PATIENT, horovodrun, started
from namespaces import Cluster

from horovod.timeline.doctor import examine

pytestmark = pytest.mark.slow

VICTIM = """
import os, signal, numpy as np, horovod.numpy as hvd
hvd.init()
while True:
    for _ in range(50):
        hvd.allreduce(np.ones(3), name="x")
    if hvd.rank() == 1:
        with open(os.environ["HOROVOD_TIMELINE"]) as file:
            if sum('"NEGOTIATE_' in line and '"pid":2,' in line for line in file) > 50:
                os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_host_is_told_with_its_signal_and_seen_in_timeline_and_flight_recorder(
    cluster: Cluster, tmp_path: Path
) -> None:
    trace, dumps = tmp_path / "trace.json", tmp_path / "dumps"
    ended = horovodrun(
        "-np", "2", "-H", "a:1,b:1", sys.executable, "-c", VICTIM,
        program=cluster.machines["login"].command(*PATIENT),
        HOROVOD_TIMELINE=str(trace), HOROVOD_FLIGHT_RECORDER_DIR=str(dumps),
    )  # fmt: skip
    assert ended.code == 137, ended.err
    [lost] = [line for line in ended.err.splitlines() if "PeerLostError: " in line]
    assert "rank 1 (pid " in lost and " on b) was killed by SIGKILL, while rank 0 waited in allreduce 'x'" in lost
    begins: dict[int, dict[int, float]] = {}
    for event in json.loads(trace.read_text()):
        if event["ph"] == "X" and event["name"].startswith("NEGOTIATE"):
            begins.setdefault(event["args"]["seq"], {})[event["pid"] - 1] = event["ts"]
    both = [times for times in begins.values() if len(times) == 2]
    assert len(both) > 10
    # Times are microseconds; a minute is nothing to what the clocks of the hosts are apart.
    assert all(abs(times[0] - times[1]) < 60e6 for times in both)
    text = "\n".join(examine(dumps)[0])
    assert "Job of 2 ranks on a; dumps of rank 0" in text
    assert "There is no dump of rank 1" in text and "was killed by SIGKILL" in text


WRITER = """
import numpy as np, horovod.numpy as hvd
hvd.init()
for i in range(1500):
    total = hvd.allreduce(np.full(2, i), op=hvd.Sum, name=f"x{i % 100}")
    print(i, "." * 500)
print("in the end", total.tolist())
"""


def test_full_disks_end_files_but_not_the_job(cluster: Cluster, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    machines = [cluster.machines[name] for name in ("login", "a")]
    for machine in machines:
        mount = machine.command("mount", "-t", "tmpfs", "-o", "size=600k", "none", str(full))
        subprocess.run(mount, check=True)
    try:
        ended = horovodrun(
            "-np", "2", "-H", "a:1,b:1", "--output-filename", str(full / "out"), sys.executable, "-c", WRITER,
            program=machines[0].command(*PATIENT),
            HOROVOD_TIMELINE=str(full / "trace.json"),
        )  # fmt: skip
        events = json.loads(Path(f"/proc/{machines[1].pid}/root{full}/trace.json").read_text())
    finally:
        for machine in machines:
            subprocess.run(machine.command("umount", "-l", str(full)), check=True)
    assert ended.code == 0, ended.err
    assert sorted(line for line in ended.lines if "in the end" in line) == [
        f"[{rank}]<stdout>:in the end [2998, 2998]" for rank in (0, 1)
    ]
    assert "/rank.1/stdout misses output from here on: No space left on device" in ended.out
    assert f"the timeline {full}/trace.json ends here: [Errno 28] No space left on device" in ended.err
    assert len(events) > 100


NEIGHBOUR = """
import os, numpy as np, horovod.numpy as hvd
hvd.init()
print("up", os.getpid(), flush=True)
while True:
    hvd.allreduce(np.ones(3), name="x")
"""


@pytest.mark.parametrize("is_guard", [False, True], ids=["keeper", "guard"])
def test_a_rank_that_fails_because_another_host_is_lost_is_not_blamed(cluster: Cluster, is_guard: bool) -> None:
    """Its agent is slow, so that the ranks of the first host have failed long before the loss is known."""
    before = {*cluster.processes("a"), *cluster.processes("b")}
    flags = ("-np", "2", "-H", "a:1,b:1", sys.executable, "-c", NEIGHBOUR)
    program = cluster.machines["login"].command(*HOROVODRUN)
    with started(*flags, ranks=2, program=program, is_here=False) as running:
        near, far = (
            {pid: text for pid, text in cluster.processes(host).items() if pid not in before} for host in ("a", "b")
        )
        agent = next(pid for pid, text in far.items() if "horovod.launch.agent" in text)
        keepers = sorted(pid for pid, text in far.items() if "keeper.py" in text)  # the guard was there first
        rank = os.pidfd_open(next(pid for pid, text in near.items() if "hvd.allreduce" in text and "-c" in text))
        os.kill(agent, signal.SIGSTOP)
        os.kill(keepers[not is_guard], signal.SIGKILL)
        select.select([rank], [], [])
        os.close(rank)
        os.kill(agent, signal.SIGCONT)
        ended = running.end()
    assert ended.code == 1
    first = next(line for line in ended.err.splitlines() if line.startswith("horovodrun: "))
    assert first.startswith("horovodrun: host b was lost with rank 1: ")
