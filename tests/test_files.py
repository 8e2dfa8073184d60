"""Files whose names other users may know do not follow their links."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import horovodrun

from horovod.files import create_file, final_path
from horovod.launch.plan import Rotation
from horovod.launch.rotation import OutputFile
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


def test_a_pipe_that_nobody_reads_is_an_error_and_one_with_a_reader_takes_all_data(tmp_path: Path) -> None:
    (tmp_path / "rank.0").mkdir()
    pipe = tmp_path / "rank.0" / "stdout"
    os.mkfifo(pipe)
    ended = horovodrun("-np", "1", "--output-filename", str(tmp_path), sys.executable, "-c", "print('mine')")
    assert ended.code == 1
    assert f"No such device or address: '{pipe}'" in ended.err
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with open(create_file(pipe), "wb") as file:
        assert os.get_blocking(file.fileno())
    os.close(reader)


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


@pytest.mark.parametrize("backups", [0, 1, 3])
@pytest.mark.parametrize("piece", [1, 7, 64, 1000])
def test_full_files_are_renamed_and_hold_whole_lines(backups: int, piece: int, tmp_path: Path) -> None:
    path = tmp_path / "rank.0" / "stdout"
    path.parent.mkdir()
    for number in range(1, 6):
        (path.parent / f"stdout.{number}").write_text("of an earlier job")
    whole = b"".join(b"line %d\n" % i for i in range(40))
    file = OutputFile(path, Rotation(100, backups))
    for i in range(0, len(whole), piece):
        file.write(whole[i : i + piece])
    file.close()
    kept = [path, *(path.with_name(f"stdout.{number}") for number in range(1, backups + 1))]
    texts = [one.read_bytes() for one in reversed(kept)]
    assert all(0 < len(text) <= 100 for text in texts)
    assert whole.endswith(b"".join(texts)), "the last ones in order, nothing lost between them"
    if piece == 1000:
        assert all(text.startswith(b"line ") and text.endswith(b"\n") for text in texts)
    later = path.with_name(f"stdout.{backups + 1}")
    assert later.read_text() == "of an earlier job", "only files that this job names are touched"


def test_a_line_longer_than_a_file_is_split(tmp_path: Path) -> None:
    file = OutputFile(tmp_path / "stdout", Rotation(100, 9))
    file.write(b"x" * 250)
    file.close()
    assert [len((tmp_path / name).read_bytes()) for name in ("stdout.2", "stdout.1", "stdout")] == [100, 100, 50]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make links of another user")
def test_renamed_files_follow_no_links_of_others(tmp_path: Path) -> None:
    treasure = tmp_path / "treasure"
    treasure.write_text("precious")
    file = OutputFile(tmp_path / "stdout", Rotation(100, 1))
    for name in ("stdout", "stdout.1"):
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to(treasure)
        os.chown(tmp_path / name, STRANGER, STRANGER, follow_symlinks=False)
    file.write(b"x" * 150)
    file.close()
    assert treasure.read_text() == "precious"
    assert (tmp_path / "stdout").read_bytes() == b"x" * 50 and not (tmp_path / "stdout").is_symlink()


def test_horovodrun_rotates_the_files_of_all_ranks(tmp_path: Path) -> None:
    talk = "for i in range(1000): print('line', i)"
    flags = ("--output-filename", str(tmp_path), "--output-max-bytes", "2500", "--output-max-backups", "2")
    ended = horovodrun("-np", "2", *flags, sys.executable, "-c", talk)
    assert ended.code == 0, ended.err
    for rank in (0, 1):
        texts = [(tmp_path / f"rank.{rank}" / name).read_text() for name in ("stdout.2", "stdout.1", "stdout")]
        assert all(0 < len(text) <= 2500 for text in texts) and texts[2].endswith("line 999\n")
        assert "".join(f"line {i}\n" for i in range(1000)).endswith("".join(texts))
        assert not (tmp_path / f"rank.{rank}" / "stdout.3").exists()
    for wrong in (flags[2:], (*flags[:3], "99"), (*flags[:5], "-1"), (*flags, "--mpi")):
        ended = horovodrun("-np", "2", *wrong, sys.executable, "-c", "pass")
        assert ended.code == 2 and "--output-max-bytes" in ended.err
