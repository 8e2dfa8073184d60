"""Which CPUs are one core, in a made-up file system."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod.processors import affinities, core_of, physical_cores, share_cores

#: Two cores of two hyperthreads each, numbered as Linux usually does; and as some machines do.
ACROSS = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}
BESIDE = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}
ALONE = {0: "0", 1: "1", 2: "2", 3: "3"}


def sysfs(root: Path, siblings: dict[int, str], name: str = "thread_siblings_list") -> Path:
    for cpu, text in siblings.items():
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / name).write_text(f"{text}\n")
    return root


@pytest.mark.parametrize("name", ["thread_siblings_list", "core_cpus_list"])
@pytest.mark.parametrize(("siblings", "cores"), [(ACROSS, [0, 1, 0, 1]), (BESIDE, [0, 0, 2, 2]), (ALONE, [0, 1, 2, 3])])
def test_the_core_of_a_cpu(tmp_path: Path, name: str, siblings: dict[int, str], cores: list[int]) -> None:
    root = sysfs(tmp_path, siblings, name)
    assert [core_of(cpu, root) for cpu in range(4)] == cores
    assert physical_cores(range(4), root) == len(set(cores))


@pytest.mark.parametrize("text", ["", "rubbish", "7", "1-", "-1"])
def test_what_the_kernel_does_not_say_is_a_core_of_its_own(tmp_path: Path, text: str) -> None:
    assert core_of(0, tmp_path) == 0
    assert core_of(0, sysfs(tmp_path, {0: text})) == 0


def ranks(*cpus: str) -> list[frozenset[int]]:
    return [frozenset(map(int, allowed)) for allowed in cpus]


@pytest.mark.parametrize(
    ("siblings", "allowed", "shared"),
    [
        (BESIDE, ranks("0123", "0123"), False),
        (BESIDE, ranks("0123", "0123", "0123"), True),
        (BESIDE, ranks("01", "01"), True),
        (ACROSS, ranks("01", "01"), False),
        (BESIDE, ranks("0", "1"), True),
        (BESIDE, ranks("0", "2"), False),
        # Somebody who may go anywhere makes room for who is bound.
        (BESIDE, ranks("0123", "0"), False),
        (BESIDE, ranks("01", "0123"), False),
        (BESIDE, ranks("01", "01", "23"), True),
        (ALONE, ranks("012", "01", "0"), False),
        (ALONE, ranks("01", "01", "0123", "01"), True),
        # Who has ended needs no core.
        (ALONE, ranks("0", ""), False),
        ({}, ranks("01", "01"), False),
    ],
)
def test_whether_every_rank_can_have_a_core(
    tmp_path: Path, siblings: dict[int, str], allowed: list[frozenset[int]], shared: bool
) -> None:
    assert share_cores(allowed, sysfs(tmp_path, siblings)) is shared


def test_where_processes_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaffinity(pid: int) -> set[int]:
        if pid == 11:
            raise ProcessLookupError
        return {0, 1}

    monkeypatch.setattr("os.sched_getaffinity", getaffinity)
    assert affinities([10, 11]) == ranks("01", "")
