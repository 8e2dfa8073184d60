"""Cores and memory as control groups of either version tell them, in a made-up file system."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from horovod.cgroups import oom_kills, usable_cores

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
    assert usable_cores(root=files(tmp_path, content)) == cores


def test_cores_of_processes_that_are_bound_to_one_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.sched_getaffinity", {10: {0}, 11: {1}, 12: {1, 2}}.__getitem__)
    assert usable_cores([10, 11, 12], tmp_path) == 3


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
