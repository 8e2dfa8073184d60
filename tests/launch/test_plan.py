"""Launch plans, as tables."""

from __future__ import annotations

from typing import Any

import pytest

from horovod.launch.plan import LaunchPlan, LaunchRequest, Share, framework_presets, make_plan, thread_share
from horovod.world import detect


def plan(**request: Any) -> LaunchPlan:
    given: dict[str, Any] = {
        "command": ("x",),
        "num_proc": 2,
        "environ": {},
        "job": "j",
        "key": "00",
        "hostname": "box",
        "cores": 8,
    }
    return make_plan(LaunchRequest(**{**given, **request}))


def test_every_rank_knows_its_place() -> None:
    made = plan(num_proc=3)
    for rank, own in enumerate(made.ranks):
        world = detect({**made.environ, **own})
        assert (world.rank, world.size, world.local_rank, world.local_size) == (rank, 3, rank, 3)
        assert (world.cross_rank, world.cross_size, world.hostname) == (0, 1, "box")
        assert (world.launcher, world.job, world.key) == ("horovodrun", "j", b"\0")


def test_environment_is_passed_on() -> None:
    made = plan(environ={"HOME": "/h", "HOROVOD_LOG_LEVEL": "info", "PYTHONUNBUFFERED": ""})
    assert made.environ["HOME"] == "/h"
    assert made.environ["HOROVOD_LOG_LEVEL"] == "info"
    assert made.environ["PYTHONUNBUFFERED"] == "1"


def test_flag_beats_environment_beats_file() -> None:
    names = {"A": "file", "B": "file", "C": "file"}
    made = plan(file=names, environ={"B": "env", "C": "env"}, flags={"C": "flag"})
    assert [made.environ[k] for k in "ABC"] == ["file", "env", "flag"]


@pytest.mark.parametrize(
    ("sign", "goes", "stays"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1"}, {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1"}, {}),
        ({"PMI_RANK": "1"}, {"PMI_FD": "7", "MPI_LOCALRANKID": "1"}, {"PMIGHTY": "1"}),
        ({"TORCHELASTIC_RUN_ID": "t"}, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, {"RANKING": "1"}),
        ({"HOROVOD_RANK": "7"}, {"HOROVOD_SIZE": "9"}, {}),
        ({"OTHER": "1"}, {}, {"RANK": "5", "OMPI_MCA_btl": "tcp"}),
    ],
    ids=["openmpi", "mpich", "torchrun", "horovodrun", "none"],
)
def test_variables_of_an_outer_job_do_not_come_along(
    sign: dict[str, str], goes: dict[str, str], stays: dict[str, str]
) -> None:
    made = plan(environ={**sign, **goes, **stays})
    for name, value in goes.items():
        assert made.environ.get(name) != value
    for name, value in stays.items():
        assert made.environ[name] == value


ALL = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@pytest.mark.parametrize(
    ("environ", "num_proc", "cores", "expected"),
    [
        ({}, 2, 8, dict.fromkeys(ALL, 4)),
        ({}, 3, 8, dict.fromkeys(ALL, 2)),
        ({}, 4, 2, dict.fromkeys(ALL, 1)),
        ({}, 1, 8, {}),
        ({"OMP_NUM_THREADS": "3"}, 2, 8, {}),
        ({"MKL_NUM_THREADS": "3"}, 2, 8, {k: 4 for k in ALL if k != "MKL_NUM_THREADS"}),
    ],
)
def test_share_of_threads(environ: dict[str, str], num_proc: int, cores: int, expected: dict[str, int]) -> None:
    assert thread_share(environ, num_proc, cores) == expected
    made = plan(environ=environ, num_proc=num_proc, cores=cores)
    assert {k: made.environ.get(k) for k in expected} == {k: str(v) for k, v in expected.items()}
    assert len(made.notes) == bool(expected)


POOLS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "NPROC")


@pytest.mark.parametrize(
    ("environ", "num_proc", "cores", "expected"),
    [
        ({}, 2, 8, ("4", "4", "4")),
        # Never a pool of one thread, in which an operation that waits stops all others.
        ({}, 2, 2, ("1", "2", "2")),
        ({}, 1, 1, ("1", "2", "2")),
        ({}, 1, 8, (None, None, None)),
        ({"OMP_NUM_THREADS": "3"}, 2, 8, ("3", "3", "3")),
        ({"OMP_NUM_THREADS": "4,2"}, 2, 8, ("4", "4", "4")),
        ({"OMP_NUM_THREADS": "0"}, 2, 8, ("4", "4", "4")),
        ({"NPROC": "9", "TF_NUM_INTEROP_THREADS": "1"}, 2, 8, ("4", None, None)),
    ],
)
def test_presets_for_the_threads_of_frameworks(
    environ: dict[str, str], num_proc: int, cores: int, expected: tuple[str | None, ...]
) -> None:
    presets = framework_presets(environ, num_proc, cores)
    assert tuple(presets.get(name) for name in POOLS) == expected


@pytest.mark.parametrize(("num_proc", "cores", "expected"), [(2, 2, "1"), (1, 1, "1"), (2, 8, None), (1, 2, None)])
def test_threads_of_a_rank_with_one_core_share_their_heap(num_proc: int, cores: int, expected: str | None) -> None:
    assert framework_presets({}, num_proc, cores).get("MALLOC_ARENA_MAX") == expected
    tuned = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    assert "MALLOC_ARENA_MAX" not in framework_presets(tuned, num_proc, cores)


def test_presets_leave_alone_what_the_user_has_set() -> None:
    own = {"TF_CPP_MIN_LOG_LEVEL": "0", "MALLOC_TRIM_THRESHOLD_": "1", "NPROC": "7"}
    made = plan(environ=own)
    assert {name: made.environ[name] for name in own} == own
    assert made.environ["MALLOC_MMAP_THRESHOLD_"] == str(2**33)
    tuned = plan(environ={"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})
    assert not [name for name in tuned.environ if name.startswith("MALLOC_")]


def test_note_on_threads_is_one_line() -> None:
    (note,) = plan(num_proc=4, cores=8).notes
    assert note.startswith("4 ranks share 8 cores: OMP_NUM_THREADS=2")


@pytest.mark.parametrize(("num_proc", "last"), [(1, "rank.0"), (10, "rank.9"), (11, "rank.10"), (101, "rank.100")])
def test_output_folders_sort_by_rank(num_proc: int, last: str) -> None:
    folders = plan(num_proc=num_proc, output_dir="out").output_dirs
    assert folders[-1] == f"out/{last}"
    assert list(folders) == sorted(folders)
    assert len({len(folder) for folder in folders}) == 1


@pytest.mark.parametrize("num_proc", [0, -1])
def test_at_least_one_rank(num_proc: int) -> None:
    with pytest.raises(ValueError, match=rf"-np \(num_proc\) must be at least 1; received {num_proc}"):
        plan(num_proc=num_proc)


def test_ranks_of_several_hosts_know_their_place_and_share_their_host_s_cores() -> None:
    made = plan(num_proc=6, shares=(Share("a", 3, 6), Share("b", 1, 4), Share("c", 2, 2)))
    worlds = [detect({**made.environ, **own}) for own in made.ranks]
    assert [(w.rank, w.local_rank, w.local_size, w.cross_rank, w.cross_size, w.hostname) for w in worlds] == [
        (0, 0, 3, 0, 3, "a"), (1, 1, 3, 0, 2, "a"), (2, 2, 3, 0, 1, "a"),
        (3, 0, 1, 1, 3, "b"), (4, 0, 2, 2, 3, "c"), (5, 1, 2, 1, 2, "c"),
    ]  # fmt: skip
    assert [own.get("OMP_NUM_THREADS") for own in made.ranks] == ["2", "2", "2", None, "1", "1"]
    assert [(first, part.hostname, part.size) for first, part in made.parts()] == [
        (0, "a", 3),
        (3, "b", 1),
        (4, "c", 2),
    ]
    assert "3 ranks share 6 cores of a" in made.notes[0]
