"""``horovodrun --check``: advice from tables of figures, and two real hosts."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys

import pytest
from harness import Ranks
from namespaces import Cluster

from horovod.bench import check
from horovod.bench.check import advice

FAST = {"hosts": "a, b", "latency_s": 1e-4, "bytes_s": 1.2e9}
SAME = {"a": {"torch": "2.13"}, "b": {"torch": "2.13"}}


@pytest.mark.parametrize(
    ("clocks", "versions", "rows", "words"),
    [
        ({"a": 5.0, "b": 5.5}, SAME, [FAST], ()),
        ({"a": 5.0, "b": 65.0}, SAME, [FAST], ("the clock of b is 60 s ahead of that of a",)),
        ({"a": 5.0, "b": 1.0}, SAME, [FAST], ("the clock of b is 4 s behind that of a",)),
        ({"a": 5.0, "b": 5.0}, {"a": {"jax": "1"}, "b": {}}, [FAST], ("jax differs: 1 on a, missing on b",)),
        ({"a": 5.0}, {}, [FAST, {**FAST, "hosts": "a, c", "bytes_s": 5e8}], ("between a, c is slow: 0.50 GB/s",)),
        ({"a": 5.0}, {}, [{**FAST, "bytes_s": 1e8}], ("between a, b is slow: 0.10 GB/s",)),
        ({"a": 5.0}, {}, [{**FAST, "latency_s": 0.02}], ("20.00 ms",)),
    ],
    ids=["well", "ahead", "behind", "versions", "slower than others", "slow", "far"],
)
def test_advice(
    clocks: dict[str, float], versions: dict[str, dict[str, str]], rows: list[dict[str, object]], words: tuple[str, ...]
) -> None:
    found = advice(clocks, versions, rows)
    assert len(found) == len(words)
    assert all(word in sentence for word, sentence in zip(words, found, strict=True))


def _check_without_torch() -> tuple[int, str]:
    sys.modules.update({"torch": None, "mpi4py": None})  # type: ignore[dict-item]
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        return check.main(), text.getvalue()


@pytest.mark.parametrize(
    ("hosts", "code", "text"),
    [((1,), 0, "nothing to fix"), ((1, 1), 1, "to fix: ranks on several hosts need an engine")],
    ids=["one host", "two hosts"],
)
def test_hosts_without_torch_are_told_what_they_lack(hosts: tuple[int, ...], code: int, text: str) -> None:
    for outcome in Ranks(len(hosts), _check_without_torch, init=False, hosts=hosts).outcomes():
        assert outcome.error is None, outcome.text
        assert outcome.value[0] == code
        assert text in outcome.value[1]


def test_two_hosts_are_reached_and_measured_with_one_rank_each(cluster: Cluster) -> None:
    words = [sys.executable, "-m", "horovod.launch.cli", "--check", "-H", "a:4,b:4"]
    done = subprocess.run(
        cluster.machines["login"].command(*words), capture_output=True, text=True, timeout=300,
        # Debian has a python3 and no python; the variable keeps horovodrun from adding its own folder.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": "/usr/sbin:/usr/bin:/bin", "VIRTUAL_ENV": "/none"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 hosts reached, with the same khorovod: a, b" in done.stdout
    assert " GB/s, " in done.stdout
    assert "clock" not in done.stdout
    assert "differs" not in done.stdout


def test_a_cable_that_is_slow_in_one_direction_is_named(cluster: Cluster) -> None:
    def limit(*words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(cluster.machines["b"].command("tc", "qdisc", *words), capture_output=True)

    if limit("add", "dev", "eth0", "root", "tbf", "rate", "200mbit", "burst", "64kb", "latency", "400ms").returncode:
        pytest.skip("this kernel cannot slow down a network: tc qdisc add ... tbf")
    try:
        words = [sys.executable, "-m", "horovod.launch.cli", "--check", "-H", "a,b"]
        done = subprocess.run(cluster.machines["login"].command(*words), capture_output=True, text=True, timeout=300)
    finally:
        limit("del", "dev", "eth0", "root")
    assert "to fix: the network between a, b is slow: 0.0" in done.stdout, done.stdout + done.stderr


def test_two_hosts_that_cannot_reach_each_other_are_named(cluster: Cluster) -> None:
    def route(host: str, word: str) -> None:
        for address in (cluster.machines["c"].ipv4, cluster.machines["c"].ipv6):
            subprocess.run(cluster.machines[host].command("ip", "route", word, "unreachable", address), check=True)

    route("b", "add")
    try:
        words = [sys.executable, "-m", "horovod.launch.cli", "--check", "-H", "a,b,c"]
        done = subprocess.run(cluster.machines["login"].command(*words), capture_output=True, text=True, timeout=300)
    finally:
        route("b", "del")
    fixes = [line.partition("to fix: ")[2] for line in done.stdout.splitlines() if "to fix: " in line]
    assert done.returncode == 1
    assert [fix.partition(" at ")[0] for fix in fixes] == ["b cannot connect to c", "c cannot connect to b"], done
    assert "GB/s" not in done.stdout


def test_a_host_that_cannot_be_reached_is_named(cluster: Cluster) -> None:
    words = [sys.executable, "-m", "horovod.launch.cli", "--check", "-H", "a,closed"]
    done = subprocess.run(cluster.machines["login"].command(*words), capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "closed: nothing listens on port 9" in done.stderr
