"""Which ranks will not come any more, from the keeper's table and from who was there before."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from horovod.rendezvous.endings import Endings, exits_name
from horovod.world import EXITS_VARIABLE, ON_HOST, World


def _world(job: str, launcher: str = "horovodrun") -> World:
    return World(0, 3, 0, 3, 0, 1, "host", launcher, job, b"key")


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([(7, 0, 0), (8, 0, 0), (9, 0, 0)], None),
        (
            [(7, 0, 0), (8, 1, 0), (9, 0, 0)],
            (1, "rank 1 (pid 8) on host host ended with exit code 0 before its init() was done"),
        ),
        (
            [(7, 0, 0), (8, 0, 0), (9, 1, 3)],
            (2, "rank 2 (pid 9) on host host ended with exit code 3 before its init() was done"),
        ),
        (
            [(7, 0, 0), (8, 1, -9), (9, 1, 3)],
            (1, "rank 1 (pid 8) on host host was killed by SIGKILL before its init() was done"),
        ),
        (
            [(7, 0, 0), (8, 1, -63)],
            (1, "rank 1 (pid 8) on host host was killed by signal 63 before its init() was done"),
        ),
        # The keeper has not come so far.
        ([(7, 0, 0)], None),
    ],
)
@pytest.mark.parametrize("job", ["job", "not utf-8: \udcff"])
def test_what_the_keeper_wrote_down(
    rows: list[tuple[int, int, int]], told: tuple[int, str] | None, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = os.memfd_create(exits_name(job))
    with open(table, "wb") as file:
        file.write(b"".join(struct.pack("<iiii", *row, 0) for row in rows))
        file.flush()
        monkeypatch.setenv(EXITS_VARIABLE, f"/proc/{os.getpid()}/fd/{table}")
        for own in (_world(job), _world(f"{job}{ON_HOST}b")):  # one host; of several hosts one
            with closing(Endings(own)) as endings:
                assert endings.ended([1, 2]) == told
        # A table of another job, and a job of another launcher inside.
        for other in (_world(job + "2"), _world(job, "openmpi")):
            with closing(Endings(other)) as endings:
                assert endings.ended([1, 2]) is None


@pytest.mark.parametrize("where", ["", "/proc/0/fd/3", "/no/such/file"])
def test_a_table_that_cannot_be_read_tells_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXITS_VARIABLE, where)
    with closing(Endings(_world("job"))) as endings:
        assert endings.ended([0, 1, 2]) is None


def test_who_was_there_before_is_missed() -> None:
    with closing(Endings(_world("before"))) as endings:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            endings.met([os.getpid(), process.pid])
            assert endings.ended([0, 1, 2]) is None
            process.communicate()
        who = f"rank 1 (pid {process.pid}) on host host"
        text = f"{who}, which was in the job before, has ended before its init() was done"
        assert endings.ended([0, 1, 2]) == (1, text)
    with closing(Endings(_world("another"))) as endings:
        assert endings.ended([0, 1, 2]) is None


def test_a_process_with_the_number_of_an_earlier_one_is_another(tmp_path: Path) -> None:
    folder = tmp_path / "77"
    folder.mkdir()
    words = ["S", "1", *["0"] * 17, "500"]
    (folder / "stat").write_text(f"77 (python) {' '.join(words)}")
    with closing(Endings(_world("reused"), tmp_path)) as endings:
        endings.met([77])
        assert endings.ended([0]) is None
        (folder / "stat").write_text(f"77 (other) {' '.join([*words[:-1], '900'])}")
        assert endings.ended([0]) is not None
