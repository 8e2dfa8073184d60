"""Cores that are not the ranks' own, in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import pytest

from horovod.bench.host import Load
from horovod.bench.siblings import core_facts, describe, slowdown, stolen_share

T = TypeVar("T")


class _Pair:
    """Two ranks that may run on the same CPUs, seen by the first."""

    rank, size = 0, 2

    def barrier(self) -> None: ...

    def broadcast(self, value: T) -> T:
        return value

    def gather(self, value: T) -> list[T]:
        return [value, value]


def _siblings(root: Path, *groups: str) -> Path:
    for cpu, group in enumerate(groups):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(group)
    return root


@pytest.mark.parametrize(
    ("groups", "cores", "shared"), [(("0-1", "0-1"), 1, True), (("0", "1"), 2, False), ((), 2, False)]
)
def test_facts_come_from_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: tuple[str, ...], cores: int, shared: bool
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    facts = core_facts(_Pair(), _siblings(tmp_path, *groups))
    assert facts == {"cpus": 2, "cores": cores, "shared": shared}


def test_the_same_work_alone_and_together() -> None:
    assert slowdown(_Pair(), 3) > 0


def test_the_part_that_was_stolen() -> None:
    used = Load(20.0, 0.0, 0.0, 3.0).since(Load(10.0, 0.0, 0.0, 1.0))
    assert stolen_share(used, 2) == pytest.approx(0.1)
    assert stolen_share(Load(0.0, 0.0, 0.0, 0.0), 2) == 0


def _said(**more: Any) -> str:
    return "\n".join(describe({"cpus": 2, "cores": 2, "shared": False, "slowdown": 1.0, "stolen": 0.0} | more))


def test_what_is_said_of_cores_of_ones_own() -> None:
    assert _said() == (
        "the ranks' 2 CPUs are 2 cores; work that needs nothing but a core takes 1.00 times as long on all ranks at "
        "once as on one"
    )


def test_what_is_said_of_hyperthreads() -> None:
    said = _said(cores=1, shared=True, slowdown=1.6)
    assert "2 CPUs are 1 core: ranks are hyperthreads of one core" in said
    assert "about 38% of what a call computes" in said
    assert "that it does not show" in _said(slowdown=1.6)


def test_what_is_said_of_stolen_time() -> None:
    assert "12.0% of the CPUs' time was stolen" in _said(stolen=0.12)
    assert "stolen" not in _said(stolen=0.001)
