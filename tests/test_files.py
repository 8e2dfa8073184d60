"""Files whose names other users may know do not follow their links."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import horovodrun

from horovod.files import create_file, final_path
from horovod.timeline.file import TraceFile

STRANGER = 12345
_trees = [("a/stdout", "a/stdout"), ("a/stdout", "a"), ("a/b/stdout", "a"), ("a/b/stdout", "a/b")]


def _write(path: Path) -> None:
    os.close(create_file(path))


def _trace(path: Path) -> None:
    TraceFile(path, b"{}").finish()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make links of another user")
@pytest.mark.parametrize("write", [_write, _trace])
@pytest.mark.parametrize(("name", "link"), _trees)
def test_a_link_of_another_user_is_refused_and_one_of_our_own_is_not(
    write: Callable[[Path], None], name: str, link: str, tmp_path: Path
) -> None:
    treasure = tmp_path / "treasure"
    (treasure / "b").mkdir(parents=True)
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to(treasure / "file" if name == link else treasure)
    write(tmp_path / name)
    assert [path for path in treasure.rglob("*") if path.is_file()] != []
    for path in treasure.rglob("*"):
        if path.is_file():
            path.unlink()
    os.chown(tmp_path / link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(PermissionError, match=f"symbolic link of another user \\(uid {STRANGER}\\)"):
        write(tmp_path / name)
    assert [path for path in treasure.rglob("*") if path.is_file()] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders of another user")
def test_output_in_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank.0").mkdir()
    os.chown(tmp_path / "rank.0", STRANGER, STRANGER)
    ended = horovodrun("-np", "1", "--output-filename", str(tmp_path), sys.executable, "-c", "print('mine')")
    assert ended.code == 1
    assert f"the folder belongs to another user (uid {STRANGER})" in ended.err
    assert [*(tmp_path / "rank.0").iterdir()] == []


def test_links_in_a_circle_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for act in (lambda: create_file(tmp_path / "a" / "x"), lambda: final_path(tmp_path / "a")):
        with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
            act()


def test_folders_are_made_and_an_older_file_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in (b"long text", b"short"):
        with open(create_file(Path("a/../b/c/stdout")), "wb") as file:
            file.write(text)
    assert Path("b/c/stdout").read_bytes() == b"short"


def test_two_processes_may_make_a_folder_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = os.mkdir

    def second(name: str, *, dir_fd: int) -> None:
        make(name, dir_fd=dir_fd)
        make(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", second)
    _write(tmp_path / "a" / "b" / "stdout")
    assert (tmp_path / "a" / "b" / "stdout").exists()
