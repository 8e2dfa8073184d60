"""Cores and memory as control groups of either version tell them, in a made-up file system."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from horovod.launch.machine import is_this_host, oom_kills, usable_cores

ALL = len(os.sched_getaffinity(0))


def files(root: Path, content: dict[str, str]) -> Path:
    for name, text in content.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1 = "4:memory:/a/b\n2:cpu,cpuacct:/a/b\n"


@pytest.mark.parametrize(
    ("content", "cores"),
    [
        ({}, ALL),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, ALL),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "100000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/not/mounted\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us": "100000",
            },
            ALL,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "100000",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            },
            1,
        ),
    ],
    ids=["nothing", "v2 no limit", "v2 one", "v2 half, above", "v2 at the mount", "v1 no limit", "v1 one, above"],
)
def test_cores(tmp_path: Path, content: dict[str, str], cores: int) -> None:
    assert usable_cores(files(tmp_path, content)) == cores


@pytest.mark.parametrize(
    ("content", "kills"),
    [
        ({}, -1),
        ({"proc/vmstat": "pgfault 3\noom_kill 4\n"}, 4),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.events": "oom 7\noom_kill 2\n", "proc/vmstat": ""}, 2),
        ({"proc/self/cgroup": V1, "sys/fs/cgroup/memory/a/b/memory.oom_control": "under_oom 0\noom_kill 5\n"}, 5),
    ],
    ids=["nothing", "machine", "v2", "v1"],
)
def test_oom_kills(tmp_path: Path, content: dict[str, str], kills: int) -> None:
    assert oom_kills(files(tmp_path, content)) == kills


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "127.0.1.1", "::1", os.uname().nodename])
def test_names_of_this_host(name: str) -> None:
    assert is_this_host(name)


@pytest.mark.parametrize("name", ["192.0.2.1", "no-such-host.invalid", "a..b", ""])
def test_names_that_are_not_this_host(name: str) -> None:
    assert not is_this_host(name)
