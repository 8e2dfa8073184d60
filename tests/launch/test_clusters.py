"""horovodrun over several hosts: who is where, what travels, what is said before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launching import HOROVODRUN, horovodrun
from namespaces import Cluster

pytestmark = pytest.mark.slow

WHO = (
    "import os; print(os.uname().nodename, *(os.environ['HOROVOD_' + name] for name in "
    "('RANK', 'SIZE', 'LOCAL_RANK', 'LOCAL_SIZE', 'CROSS_RANK', 'CROSS_SIZE', 'HOSTNAME')))"
)


def on(cluster: Cluster, host: str = "login", program: list[str] = HOROVODRUN) -> list[str]:
    return cluster.machines[host].command(*program)


@pytest.mark.parametrize(
    ("launcher", "hosts", "expected"),
    [
        ("login", "a:2,b:1", ["a 0 3 0 2 0 2 a", "a 1 3 1 2 0 1 a", "b 2 3 0 1 1 2 b"]),
        ("login", "b:2", ["b 0 2 0 2 0 1 b", "b 1 2 1 2 0 1 b"]),
        ("a", "a:1,[fd77::3]:1", ["a 0 2 0 1 0 2 a", "b 1 2 0 1 1 2 fd77::3"]),
        ("a", "b:1,localhost:1", ["b 0 2 0 1 0 2 b", "a 1 2 0 1 1 2 a"]),
    ],
    ids=["from a login node", "all on one other host", "from a host, IPv6", "localhost mixed with names"],
)
def test_every_rank_knows_its_place(cluster: Cluster, launcher: str, hosts: str, expected: list[str]) -> None:
    size = str(len(expected))
    flags = ("-np", size, "-p", "22", "-H", hosts)
    ended = horovodrun(*flags, sys.executable, "-c", WHO, program=on(cluster, launcher))
    assert (ended.code, ended.err) == (0, "")
    assert sorted(ended.lines) == [f"[{rank}]<stdout>:{line}" for rank, line in enumerate(expected)]


def test_the_environment_travels_but_not_what_belongs_to_a_host(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    show = 'echo "$MINE|$TMPDIR|$XDG_RUNTIME_DIR|$DISPLAY|$NCCL_SOCKET_IFNAME|${HOROVOD_SECRET_KEY:+key}|$PWD"'
    ended = horovodrun(
        "-np", "2", "--hostfile", str(tmp_path / "hosts"), "--network-interfaces", "eth0,lo",
        "--output-filename", str(tmp_path / "out"), "sh", "-c", show,
        program=on(cluster),
        MINE="two\nlines, 'quotes' and \udce9", TMPDIR="/far", XDG_RUNTIME_DIR="/far", DISPLAY=":7",
    )  # fmt: skip
    assert (ended.code, ended.err) == (0, "")
    for rank in (0, 1):
        said = (tmp_path / "out" / f"rank.{rank}" / "stdout").read_bytes()
        assert said == b"two\nlines, 'quotes' and \xe9||||eth0,lo|key|%s\n" % str(Path.cwd()).encode()


def test_everything_that_is_wrong_is_said_at_once(cluster: Cluster) -> None:
    hosts = "nowhere,closed,stranger,keyless,asking,a,10.77.0.2,10.77.0.99"
    ended = horovodrun("-np", "8", "-H", hosts, "touch", "started", program=on(cluster))
    assert ended.code == 1
    said = dict(line.strip().split(": ", 1) for line in ended.err.splitlines()[1:])
    meant = {
        "nowhere": "the name is unknown; correct it",
        "closed": "nothing listens on port 9; start sshd",
        "stranger": "its host key is unknown; run `ssh stranger` once",
        "keyless": "it refused the key (root@10.77.0.2: Permission denied",
        "asking": "it wants a password, which horovodrun never asks for",
        "10.77.0.2": "it is the same machine as a; name each machine once",
        "10.77.0.99": "it cannot be reached",
    }
    assert said.keys() == meant.keys()
    for host, text in meant.items():
        assert said[host].startswith(text)


def test_a_host_that_lacks_something_says_what(cluster: Cluster, tmp_path: Path) -> None:
    bare, old = tmp_path / "bare", tmp_path / "old"
    bare.write_text("#!/bin/sh\necho 'python: No module named horovod' >&2; exit 1\n")
    old.write_text(
        f"#!/bin/sh\necho noise; exec {sys.executable} -c "
        "'import horovod._version as v; v.__version__ = \"0.0.1\"; from horovod.launch import agent; agent.main()'\n"
    )
    for path in (bare, old):
        path.chmod(0o755)
    for flags, command, text in [
        (("--python", "/no/such"), "true", "there is no Python at /no/such; install it there at the same path"),
        (("--python", str(bare)), "true", "has no khorovod, or one too old"),
        (("--python", str(old)), "true", "it has khorovod 0.0.1, and this host "),
        ((), "no-such-command", "the command 'no-such-command' was not found there"),
        (("--network-interfaces", "eth7"), "true", "there is no network interface eth7; it has lo, eth0"),
    ]:
        ended = horovodrun("-np", "2", "-H", "a,b", *flags, command, program=on(cluster))
        assert ended.code == 1
        lines = ended.err.splitlines()
        assert lines[0] == "horovodrun: error: no rank was started:"
        assert [line.strip()[:3] for line in lines[1:]] == ["a: ", "b: "]
        assert all(text in line for line in lines[1:])


def test_a_host_that_does_not_answer_in_time_is_named(cluster: Cluster, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 300\n")
    slow.chmod(0o755)
    ended = horovodrun(
        "-np", "1", "-H", "a", "--start-timeout", "1", "--python", str(slow), "true", program=on(cluster)
    )
    assert ended.code == 1
    assert "a did not answer within 1 s" in ended.err and "--start-timeout" in ended.err


def test_lines_of_all_hosts_are_whole(cluster: Cluster) -> None:
    program = "import sys\nfor i in range(3000): sys.stdout.write(f'{i} ' + 'x' * 300 + '\\n')"
    ended = horovodrun("-np", "4", "-H", "a:2,b:2", sys.executable, "-c", program, program=on(cluster))
    assert ended.code == 0
    for rank in range(4):
        mine = [line for line in ended.lines if line.startswith(f"[{rank}]<stdout>:")]
        assert mine == [f"[{rank}]<stdout>:{i} " + "x" * 300 for i in range(3000)]


def test_a_function_runs_on_other_hosts(cluster: Cluster) -> None:
    program = (
        "import horovod, os\n"
        "def who(x): return x, os.environ['HOROVOD_HOSTNAME'], b'1' * 200000\n"
        "told = horovod.run(who, (7,), num_proc=3, hosts='a:1,localhost:1,b:1')\n"
        "print([(x, host, len(data)) for x, host, data in told])"
    )
    ended = horovodrun(program=[*on(cluster, program=[sys.executable]), "-c", program])
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == "[(7, 'a', 200000), (7, 'login', 200000), (7, 'b', 200000)]\n"


SUM = "import numpy as np, horovod.numpy as hvd; hvd.init(); print(hvd.allreduce(np.ones(2), op=hvd.Sum).tolist())"


def test_of_several_interfaces_one_that_leads_nowhere_is_passed_over(cluster: Cluster) -> None:
    """As on hosts with docker: each has a bridge of its own, with the same address."""
    machines = [cluster.machines[name] for name in ("login", "a", "b")]
    add = "ip link add lonely type bridge; ip addr add 172.31.0.1/16 dev lonely; ip link set lonely up"
    try:
        for machine in machines:
            subprocess.run(machine.command("sh", "-ec", add), check=True)
        ended = horovodrun(
            "-np", "2", "-H", "a,b", "--network-interfaces", "lonely,eth0", sys.executable, "-c", SUM,
            program=on(cluster),
        )  # fmt: skip
    finally:
        for machine in machines:
            subprocess.run(machine.command("ip", "link", "del", "lonely"), check=False)
    assert (ended.code, ended.err) == (0, "")
    assert sorted(ended.lines) == ["[0]<stdout>:[2.0, 2.0]", "[1]<stdout>:[2.0, 2.0]"]
