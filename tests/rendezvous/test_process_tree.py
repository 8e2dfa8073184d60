"""Children of a rank, by the process table; real children are in engine/test_init.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod.launchers import LAUNCHERS, Launcher
from horovod.rendezvous.process_tree import control_name, is_no_rank, rank_above
from horovod.world import World, detect

OURS = f"7f00-7f01 rw-s 00000000 00:01 77 /memfd:{control_name('job')} (deleted)\n"
OTHERS = OURS.replace(control_name("job"), control_name("job2"))
PLAIN = "7f00-7f01 r--p 00000000 00:01 78 /usr/bin/python3\n"


@pytest.mark.parametrize(
    ("above", "found"),
    [
        ([OURS, PLAIN], 101),
        ([PLAIN, PLAIN, OURS], 103),
        ([OURS, OURS], 101),
        # A job in a job: the launcher inside, then a rank of the outer one.
        ([PLAIN, OTHERS], 0),
        ([PLAIN, PLAIN], 0),
        # Another user's process, whose memory is not to be read.
        ([None, OURS], 0),
    ],
)
def test_the_nearest_ancestor_that_is_in_the_job_counts(tmp_path: Path, above: list[str | None], found: int) -> None:
    for number, maps in enumerate([PLAIN, *above]):
        process = tmp_path / str(100 + number)
        process.mkdir()
        parent = 101 + number if number < len(above) else 0
        (process / "stat").write_text(f"{100 + number} (a (b) c) S {parent} 1 1")
        if maps is not None:
            (process / "maps").write_text(maps)
    assert rank_above("job", tmp_path, 100) == found


@pytest.mark.parametrize("row", LAUNCHERS, ids=lambda row: row.name)
def test_a_program_without_the_variables_that_are_named_is_no_rank(row: Launcher) -> None:
    environ = dict.fromkeys((*row.sign, row.rank, row.size), "2") | {row.rank: "1"}
    text = is_no_rank(World(1, 2, 1, 2, 0, 1, "host", row.name, "job", b""), 77)
    named = text.rpartition("without ")[2].partition(" in its")[0].replace(" and ", ", ").split(", ")
    assert detect({name: value for name, value in environ.items() if name not in named}).launcher == "none"
