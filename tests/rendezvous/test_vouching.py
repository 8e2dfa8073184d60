"""The file through which rank 0 hands the key to the others where there is no MUNGE."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from horovod.errors import InitError
from horovod.rendezvous import vouching
from horovod.rendezvous.munge import MungeError
from horovod.world import Meeting, World

RUN = "run 7"


@pytest.fixture(autouse=True)
def _lone_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise MungeError("no MUNGE here")

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(vouching, "Munge", refuse)


def _vouch(rank: int, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(vouching, "_found", {})  # as in a new process
    world = World(rank, 2, 0, 1, rank, 2, f"host{rank}", "srun", "job", b"", Meeting("hosts", (), RUN))
    return vouching.vouch(world, 0.0)


def test_rank_0_replaces_the_key_that_a_killed_run_of_this_name_left(monkeypatch: pytest.MonkeyPatch) -> None:
    left = _vouch(0, monkeypatch).key
    assert left and _vouch(1, monkeypatch).key == left
    new = _vouch(0, monkeypatch).key
    assert new not in (b"", left) and _vouch(1, monkeypatch).key == new


def _widen(path: Path) -> None:
    path.chmod(0o640)


def _give_away(path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give a file to another user")
    os.chown(path, 65534, -1)


def _link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_suffix(".moved")))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _rename_run(path: Path) -> None:
    path.write_bytes(msgspec.msgpack.encode(vouching.Offer("run 8", b"k" * 32, [])))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("spoil", [_widen, _give_away, _link, _pipe, _rename_run, _cut])
def test_a_file_that_others_may_have_written_or_read_holds_no_key(spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _vouch(0, monkeypatch)
    (path,) = (Path.home() / ".horovod").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    spoil(path)
    with pytest.raises(InitError, match="got no key from rank 0 within 0 s"):
        _vouch(1, monkeypatch)
