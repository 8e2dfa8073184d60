"""horovodrun with elastic jobs: losses, replacements, hosts that come and go, and how such jobs end."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import HOROVODRUN, Ended, horovodrun, started
from namespaces import Cluster

import horovod

PY = sys.executable
HOST = os.uname().nodename
# Trains until a generation after the one in ``after`` has ``size`` ranks. ``acts`` says how a rank ends before its
# first step in a generation up to ``until``. ``phases`` are words that rank 0 writes for the script that names hosts:
# each one when the ranks are as many as it says, and the script has read the one before.
TRAIN = """
import ctypes, json, multiprocessing, os, sys, time
from pathlib import Path
import numpy as np
import horovod.numpy as hvd
from horovod import context
from horovod.errors import DismissedError
from horovod.logs import logger

plan = json.loads(sys.argv[1])
phases = plan.get("phases", [])
hvd.init()
step, reads = 0, 0

def fail(depth):  # its traceback is long
    if not depth:
        raise ValueError(f"bad batch in generation {number}")
    (lambda: fail(depth - 1))()

def next_phase():
    global reads
    calls = len(Path("calls").read_text()) if Path("calls").exists() else 0
    if phases and hvd.size() == phases[0][0] and calls >= reads:
        Path("phase.new").write_text(phases.pop(0)[1])
        os.replace("phase.new", "phase")
        reads = calls + 3  # the first of them may have begun before

while True:
    try:
        context.renew(step, str(step))
    except DismissedError:
        print("dismissed", flush=True)
        sys.exit()
    number = context.membership().number
    if number == 1:
        print("up", os.getpid(), flush=True)
    act = plan.get("acts", {}).get(f"{hvd.rank()}") if number <= plan.get("until", 1) else None
    if act == "kill":
        os.kill(os.getpid(), 9)
    elif act in ("exit 0", "exit 7"):
        os._exit(int(act[-1]))
    elif act == "stop":
        held = multiprocessing.get_context("spawn").Semaphore()
        print("holds", held._semlock.name, flush=True)
        os.kill(os.getpid(), 19)
    elif act == "hold":
        ctypes.PyDLL(None).sleep(7)  # with the GIL
    elif act == "raise":
        fail(20)
    try:
        step = int(hvd.broadcast(np.array([step]), 0, name="step")[0])
        is_over = False
        while not is_over:
            if hvd.size() >= plan.get("least", 1):
                step += int(hvd.allreduce(np.ones(1), op=hvd.Sum, name="one")[0]) == hvd.size()
            if hvd.rank() == 0:
                next_phase()
            done = number > plan["after"] and hvd.size() == plan["size"] and not phases
            words = hvd.broadcast(np.array([done, context.wants_change()]), 0, name="words")
            is_over = words.any()
            time.sleep(0.01)
        if words[0]:
            break
    except hvd.HorovodInternalError:
        pass
logger.warning("over")
print("done", hvd.rank(), hvd.size(), step, flush=True)
"""
SOON = ("--blacklist-cooldown-range", "1", "1")
NEVER = ("--blacklist-cooldown-range", "3600", "3600")


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return str(path)


def done(ended: Ended) -> list[tuple[int, int, int]]:
    """Rank, size and steps of all that have come to the end, by rank."""
    assert ended.code == 0, ended.err
    found = re.findall(r"^\[(\d+)\]<stdout>:done (\d+) (\d+) (\d+)$", ended.out, re.MULTILINE)
    assert all(label == rank for label, rank, _, _ in found)
    logged = re.findall(r"^\[(\d+)\]<stderr>:.* horovod\[(\d+)\] WARNING: over$", ended.err, re.MULTILINE)
    assert sorted(logged) == sorted((rank, rank) for _, rank, _, _ in found)
    return sorted((int(rank), int(size), int(step)) for _, rank, size, step in found)


@pytest.mark.parametrize(
    ("act", "how", "ready"),
    [
        ("kill", "was killed by SIGKILL", SOON),
        ("kill", "was killed by SIGKILL", (*NEVER, "--spares", "1")),
        ("exit 7", "ended with exit code 7", SOON),
        ("exit 0", "left with exit code 0", SOON),
    ],
)
def test_a_lost_rank_is_replaced(act: str, how: str, ready: tuple[str, ...], script: str) -> None:
    plan = json.dumps({"acts": {"1": act}, "after": 1, "size": 3})
    ended = horovodrun("-np", "3", "--min-np", "2", *ready, PY, script, plan)
    found = done(ended)
    assert [(rank, size) for rank, size, _ in found] == [(0, 3), (1, 3), (2, 3)]
    assert len({step for *_, step in found}) == 1
    lost = rf"^horovodrun: rank 1 \(pid \d+ on {HOST}:\d\) {how}; [23] ranks continue at step 0, after \d"
    assert re.search(lost, ended.err, re.MULTILINE), ended.err
    assert re.search(rf"^horovodrun: rank \d on {HOST}:\d joined; 3 ranks continue at step \d", ended.err, re.MULTILINE)
    assert re.search(
        r"^horovodrun: 1 loss and 1 join by step \d+, [12] resets?, .* goodput \d", ended.err, re.MULTILINE
    )


def test_a_stopped_rank_is_killed_and_one_that_holds_the_gil_is_not(script: str) -> None:
    plan = json.dumps({"acts": {"0": "hold", "1": "stop"}, "after": 1, "size": 2})
    ended = horovodrun("-np", "3", "--min-np", "2", *NEVER, PY, script, plan)
    assert [(rank, size) for rank, size, _ in done(ended)] == [(0, 2), (1, 2)]
    killed = rf"rank 1 \(pid \d+ on {HOST}:1\) was killed by horovodrun: it was stopped \(such as by SIGSTOP\)"
    assert re.search(rf"^horovodrun: {killed} and had not answered for 5 s; 2 ranks continue", ended.err, re.MULTILINE)
    assert re.search(r"^horovodrun: 1 loss and 0 joins by ", ended.err, re.MULTILINE), ended.err
    [name] = re.findall(r"holds /(\S+)", ended.out)
    assert not Path(f"/dev/shm/sem.{name}").exists(), "the rank's resource tracker, a process below it, was killed"


@pytest.mark.parametrize(
    ("flags", "plan", "said", "code"),
    [
        (
            ("--min-np", "2", "--reset-limit", "0"), {"acts": {"1": "kill"}},
            "the job has ended: the job has reached its limit of resets, 0", 137,
        ),
        (
            ("--min-np", "3", "--elastic-timeout", "1", *NEVER), {"acts": {"1": "exit 7"}},
            # 2, or less on a busy machine
            "of at least 3 ranks were there within 1 s (HOROVOD_ELASTIC_TIMEOUT)", 7,
        ),
        (
            ("--min-np", "1"), {"acts": {"0": "kill", "1": "kill", "2": "kill"}},
            "the job has ended: no process is left that has the state of the job", 137,
        ),
        (
            ("--min-np", "2", *SOON), {"acts": {"2": "raise"}, "until": 99, "least": 3},
            "as another did before, at the same place: the script itself fails", 1,
        ),
    ],
    ids=["reset limit", "too few", "all lost", "own error"],
)  # fmt: skip
def test_a_job_that_cannot_go_on_ends_with_the_causes(
    flags: tuple[str, ...], plan: dict[str, Any], said: str, code: int, script: str
) -> None:
    ended = horovodrun("-np", "3", *flags, PY, script, json.dumps({**plan, "after": 99, "size": 3}))
    assert ended.code == code, ended.err
    assert said in ended.err
    causes = ended.err.partition("the processes that failed:\n")[2]
    assert len(re.findall(rf"^    rank \d \(pid \d+ on {HOST}:\d\) (was|ended)", causes, re.MULTILINE)) >= 1, ended.err


KILLED = "import os; os.environ['HOROVOD_RANK'] == '1' and os.kill(os.getpid(), 9)"


LEAVES_EARLY = """
import os, sys
if os.environ["HOROVOD_RANK"] == "1":
    sys.exit(0)
import horovod.numpy as hvd
hvd.init()
hvd.elastic.run(print)(hvd.elastic.NumpyState())
"""


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        (LEAVES_EARLY, 1, "ended with exit code 0, before the ranks had met"),
        ("import sys; sys.exit(3)", 3, "ended with exit code 3, before the ranks had met"),
        ("print(1)", 0, ""),
        (KILLED, 137, "was killed by SIGKILL, before the ranks had met"),  # one of them ends well, and the other not
    ],
)
def test_a_script_that_never_meets_is_not_started_again(program: str, code: int, said: str) -> None:
    ended = horovodrun("-np", "2", "--min-np", "1", PY, "-c", program)
    assert ended.code == code
    assert said in ended.err
    assert len(ended.lines) == (2 if code == 0 else 0)


# A second kill could come when the ranks have done their work, and end.
ONE_KILL = [
    PY,
    "-c",
    "import sys, time; from horovod.launch import cli; from horovod.launch.elastic import ElasticJob;"
    "times = iter((0.5, 1e6)); ElasticJob._next_chaos = lambda job, now: now + next(times); sys.exit(cli.main())",
]


def test_chaos_kills_and_the_job_goes_on(script: str) -> None:
    plan = json.dumps({"after": 1, "size": 3})
    ended = horovodrun("-np", "3", "--min-np", "1", "--chaos", "2s", *SOON, PY, script, plan, program=ONE_KILL)
    assert [(rank, size) for rank, size, _ in done(ended)] == [(0, 3), (1, 3), (2, 3)]
    killed = re.findall(rf"^horovodrun: --chaos kills rank (\d) on {HOST}:\d$", ended.err, re.MULTILINE)
    assert len(killed) == 1
    assert len(re.findall(r"^horovodrun: rank \d \(.*\) was killed by SIGKILL; ", ended.err, re.MULTILINE)) == 1


# Prints what the word in ``phase`` stands for, and notes in ``calls`` that it has read it.
HOSTS = """#!/bin/sh
word=$(cat phase)
printf . >> calls
case $word in
    garbage) echo '<html>';;
    nothing) ;;
    hang) printf . >> hanging; sleep 1000;;
    fail) echo 'no answer' >&2; exit 3;;
    *) echo "localhost:$word";;
esac
"""
#: The time of the script is over when it says that it hangs, and not before.
QUICK = [
    PY,
    "-c",
    "import os, sys, time, types; from horovod.launch import cli, discovery;"
    "discovery.LIMIT_S, discovery.PERIOD_S = 1000, 0.05;"
    "monotonic = lambda: time.monotonic() + 1001 * os.path.getsize('hanging');"
    "discovery.time = types.SimpleNamespace(monotonic=monotonic); sys.exit(cli.main())",
]


@pytest.fixture
def hosts(tmp_path: Path) -> str:
    path = tmp_path / "hosts.sh"
    path.write_text(HOSTS)
    path.chmod(0o755)
    (tmp_path / "phase").write_text("1")
    (tmp_path / "hanging").touch()
    return "./hosts.sh"


def test_hosts_grow_and_shrink_and_a_bad_script_changes_nothing(tmp_path: Path, script: str, hosts: str) -> None:
    phases = [(1, "3"), (3, "garbage"), (3, "nothing"), (3, "hang"), (3, "fail"), (3, "2"), (2, "2")]
    plan = json.dumps({"after": 1, "size": 2, "phases": phases})
    flags = ("-np", "1", "--min-np", "1", "--host-discovery-script", hosts)
    ended = horovodrun(*flags, PY, script, plan, program=QUICK, cwd=tmp_path)
    assert [(rank, size) for rank, size, _ in done(ended)] == [(0, 2), (1, 2)]
    assert "]<stdout>:dismissed\n" in ended.out
    assert re.search(rf"rank \d \(pid \d+ on {HOST}:2\) left; 2 ranks continue", ended.err), ended.err
    told = [line for line in ended.err.splitlines() if "the script for hosts" in line]
    problems = ["printed no list", "printed no host", "did not end within 1000 s", "exit code 3: no answer", "again"]
    assert len(told) == len(problems), told
    assert all(problem in line for problem, line in zip(problems, told, strict=True)), told


def test_a_script_that_fails_at_first_ends_the_job(tmp_path: Path, hosts: str) -> None:
    (tmp_path / "phase").write_text("fail")
    ended = horovodrun("-np", "1", "--host-discovery-script", hosts, PY, "-c", "print(1)", cwd=tmp_path)
    assert (ended.code, ended.out) == (1, "")
    assert "--host-discovery-script ./hosts.sh ended with exit code 3: no answer; it must print lines" in ended.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_nothing_is_left_of_an_elastic_job(number: signal.Signals, code: int, tmp_path: Path, script: str) -> None:
    (tmp_path / "hosts.sh").write_text(f"#!/bin/sh\nif [ -e {tmp_path}/asked ]; then echo up $$; exec sleep 1000; fi\n"
                                       f"touch {tmp_path}/asked; echo localhost:2\n")  # fmt: skip
    (tmp_path / "hosts.sh").chmod(0o755)
    flags = ("-np", "2", "--host-discovery-script", f"{tmp_path}/hosts.sh")
    plan = json.dumps({"after": 99, "size": 9})
    with started(*flags, PY, script, plan, ranks=2) as running:
        running.process.send_signal(number)
        assert running.still_alive() == []
        assert running.end().code == code


def test_horovod_run_returns_the_results_of_the_last_generation() -> None:
    def train() -> tuple[int, int, list[float]]:
        import numpy as np

        import horovod.numpy as hvd
        from horovod import context

        hvd.init()
        context.renew()
        if context.membership().number == 1 and hvd.rank() == 0:
            os._exit(7)
        try:
            hvd.allreduce(np.ones(2), name="x")
        except hvd.HorovodInternalError:
            context.renew(1)
        return hvd.rank(), hvd.size(), hvd.allgather(np.array([float(hvd.rank())]), name="ranks").tolist()

    results = horovod.run(train, num_proc=3, min_num_proc=2, max_num_proc=3, cooldown_range=(3600, 3600))
    assert results == [(0, 2, [0.0, 1.0]), (1, 2, [0.0, 1.0])]


def test_a_host_that_is_lost_and_returns(cluster: Cluster, script: str) -> None:
    plan = json.dumps({"after": 2, "size": 3})
    program = cluster.machines["login"].command(*HOROVODRUN)
    flags = ("-np", "3", "--min-np", "2", "-H", "localhost:1,a:1,b:1", *SOON)
    with started(*flags, PY, script, plan, ranks=3, program=program, is_here=False) as running:
        cluster.cut("b")
        lost = ""
        while "was lost with its host: " not in lost:
            lost = running.process.stderr.readline()
            assert lost, "the job has ended"
        cluster.mend("b")
        ended = running.end()
    assert [(rank, size) for rank, size, _ in done(ended)] == [(0, 3), (1, 3), (2, 3)]
    assert re.search(r"^horovodrun: rank 2 \(on b:0\) was lost with its host: .*; 2 ranks continue", lost), lost
    assert re.search(r"^horovodrun: rank 2 on b:0 joined; 3 ranks continue", ended.err, re.MULTILINE), ended.err


# Commits every fourth batch; all ranks wait in the sixth one until a host is lost.
SAMPLES = """
import json, os
import torch
import horovod.torch as hvd

hvd.init()
sampler = hvd.elastic.ElasticSampler(range(102), seed=3)
loader = torch.utils.data.DataLoader(range(102), batch_size=2, sampler=sampler)

@hvd.elastic.run
def train(state):
    if hvd.size() == 3:
        print("up", os.getpid(), flush=True)
    for index, batch in enumerate(loader):
        while hvd.size() == 3 and state.batch == 6:
            hvd.barrier()
        everybody = hvd.allgather_object(batch.tolist())
        state.used = state.used + [sample for each in everybody for sample in each]
        state.sampler.record_batch(index, 2)
        state.batch += 1
        if state.batch % 4 == 0:
            state.commit()
    print("used", json.dumps(state.used), flush=True)

train(hvd.elastic.TorchState(sampler=sampler, batch=0, used=[]))
"""


@pytest.fixture
def own_cluster(cluster: Cluster, tmp_path: Path) -> Iterator[Cluster]:
    """Hosts of which one may be lost for good; they need what ``cluster`` needs."""
    with Cluster(tmp_path) as own:
        yield own


def test_samples_are_used_once_when_a_host_is_lost_in_silence(own_cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "samples.py"
    path.write_text(SAMPLES)
    program = own_cluster.machines["login"].command(*HOROVODRUN)
    flags = ("-np", "3", "--min-np", "2", "-H", "localhost:1,a:1,b:1", *NEVER)
    with started(*flags, PY, str(path), ranks=3, program=program, is_here=False) as running:
        own_cluster.cut("b")
        own_cluster.crash("b")
        ended = running.end()
    assert ended.code == 0, ended.err
    assert re.search(r"^horovodrun: rank 2 \(on b:0\) was lost with its host: .*; 2 ranks continue", ended.err, re.M)
    used = [json.loads(text) for text in re.findall(r"used (\[.*\])", ended.out)]
    assert [sorted(each) for each in used] == [[*range(102)]] * 2


def test_hosts_that_are_still_missing_are_said() -> None:
    flags = ("--min-np", "1", "--start-timeout", "1", "--host-discovery-script", "echo localhost:1")
    ended = horovodrun("-np", "2", *flags, PY, "-c", "print(1)")
    assert "horovodrun: waiting for hosts: the script names 1 of 2 slots" in ended.err


def test_spares_without_slots_are_refused() -> None:
    ended = horovodrun("-np", "2", "--min-np", "1", "--spares", "1", "-H", "localhost:2", PY, "-c", "print(1)")
    assert (ended.code, ended.out) == (2, ""), ended.err
    assert "--max-np 2 and --spares 1 are more than the 2 slots of the hosts" in ended.err
