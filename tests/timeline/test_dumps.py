"""Where dumps are written: nothing that others have put there is followed, overwritten, or believed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from horovod.timeline.dumps import VERSION, Dump, read_folder, write


def dump(rank: int = 0, job: str = "job") -> Dump:
    return Dump(
        version=VERSION, job=job, rank=rank, size=2, host="h", pid=1, reason="test", time_s=1.0, clock_ns=1, position=0,
        failure="", process_sets={0: [0, 1]}, wait=None, stack=[], threads={}, pending=[], operations=[],
    )  # fmt: skip


def test_a_folder_of_ones_own_is_made_and_used(tmp_path: Path) -> None:
    path = write(dump(), tmp_path / "new" / "dumps")
    assert path == tmp_path / "new" / "dumps" / "rank-0.json"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert write(dump(), path.parent) == path, "the next one takes its place"
    assert [d.rank for d in read_folder(path.parent)[0]] == [0]
    assert list(path.parent.iterdir()) == [path]


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "dumps"
    folder.mkdir()
    (folder / "rank-0.json").symlink_to(victim)
    path = write(dump(), folder)
    assert victim.read_text() == "precious"
    assert not path.is_symlink()


def test_where_others_can_write_a_folder_of_ones_own_is_made_inside(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    path = write(dump(), shared)
    assert path == shared / f"user-{os.geteuid()}" / "rank-0.json"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    (shared / "rank-1.json").write_bytes(path.read_bytes().replace(b'"rank": 0', b'"rank": 1'))
    dumps, _ = read_folder(shared)
    assert [d.rank for d in dumps] == [0], "what anybody may have put beside it is not read"


@pytest.mark.parametrize("kind", ["link", "open", "file"])
def test_what_lies_there_in_the_place_of_that_folder_is_refused(tmp_path: Path, kind: str) -> None:
    shared, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    shared.mkdir()
    shared.chmod(0o1777)
    elsewhere.mkdir(mode=0o700)
    planted = shared / f"user-{os.geteuid()}"
    if kind == "link":
        planted.symlink_to(elsewhere)
    elif kind == "open":
        planted.mkdir()
        planted.chmod(0o777)
    else:
        planted.write_text("")
    with pytest.raises(OSError):
        write(dump(), shared)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_link_that_another_user_has_made_is_refused(tmp_path: Path) -> None:
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "link"
    elsewhere.mkdir()
    link.symlink_to(elsewhere)
    assert write(dump(), link).exists(), "a link of one's own is as good as the folder"
    os.lchown(link, 1234, 1234)
    with pytest.raises(PermissionError, match="another user"):
        write(dump(), link)


def test_no_link_and_no_pipe_is_read(tmp_path: Path) -> None:
    write(dump(1), tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "rank-0.json").symlink_to(secret)
    os.mkfifo(tmp_path / "rank-2.json")
    dumps, notes = read_folder(tmp_path)
    assert [d.rank for d in dumps] == [1]
    assert len(notes) == 2 and "secret" not in " ".join(notes)
