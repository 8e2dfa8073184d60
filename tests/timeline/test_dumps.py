"""Where dumps are written: nothing that others have put there is followed, overwritten, or believed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from harness import run_ranks

import horovod.numpy as hvd
from horovod.errors import InitError
from horovod.timeline.dumps import VERSION, Dump, read_folder, write


def dump(rank: int = 0, job: str = "job") -> Dump:
    return Dump(
        version=VERSION, job=job, rank=rank, size=2, host="h", pid=1, reason="test", time_s=1.0, clock_ns=1, position=0,
        failure="", wait=None, stack=[], threads={}, pending=[], operations=[],
    )  # fmt: skip


def test_a_folder_of_ones_own_is_made_and_used(tmp_path: Path) -> None:
    path = write(dump(), tmp_path / "new" / "dumps")
    assert path == tmp_path / "new" / "dumps" / "rank-0.json"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert write(dump(), path.parent) == path, "the next one takes its place"
    assert [d.rank for d in read_folder(path.parent)[0]] == [0]
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_where_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(PermissionError, match="name a folder of your own"):
        write(dump(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_init_refuses_a_folder_where_others_can_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    run_ranks(1, _init, init=False, env={"HOROVOD_FLIGHT_RECORDER_DIR": str(tmp_path)})


def _init() -> None:
    with pytest.raises(InitError, match=r"HOROVOD_FLIGHT_RECORDER_DIR=.*: other users can write there"):
        hvd.init()


def test_text_that_utf_8_cannot_hold_is_kept(tmp_path: Path) -> None:
    write(dump(job="caf\udce9"), tmp_path)
    assert read_folder(tmp_path)[0][0].job == "caf\udce9"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_link_that_another_user_has_made_is_refused(tmp_path: Path) -> None:
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "link"
    elsewhere.mkdir()
    link.symlink_to(elsewhere)
    assert write(dump(), link).exists(), "a link of one's own is as good as the folder"
    os.lchown(link, 1234, 1234)
    with pytest.raises(PermissionError, match="another user"):
        write(dump(), link)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_folder_and_a_link_of_another_user_are_refused(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "dumps"
    victim.write_text("precious")
    folder.mkdir()
    (folder / "rank-0.json").symlink_to(victim)
    os.lchown(folder / "rank-0.json", 1234, 1234)
    with pytest.raises(PermissionError, match="another user"):
        write(dump(), folder)
    assert victim.read_text() == "precious"
    os.chown(folder, 1234, 1234)
    with pytest.raises(PermissionError, match="name a folder of your own"):
        write(dump(1), folder)


def test_no_link_and_no_pipe_is_read(tmp_path: Path) -> None:
    write(dump(1), tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "rank-0.json").symlink_to(secret)
    os.mkfifo(tmp_path / "rank-2.json")
    dumps, notes = read_folder(tmp_path)
    assert [d.rank for d in dumps] == [1]
    assert len(notes) == 2 and "secret" not in " ".join(notes)
