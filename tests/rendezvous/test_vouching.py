"""How rank 0 hands the key to the others: through a file where there is no MUNGE, or at a port."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from horovod.errors import InitError
from horovod.rendezvous import vouching
from horovod.rendezvous.munge import Credential, MungeError
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


#: Stands for MUNGE of one user.
OPEN: Any = SimpleNamespace(uid=7, encode=lambda payload: payload, decode=lambda data: Credential(data, 7))
OFFER = vouching.Offer(RUN, b"k" * 32, [])


def test_silent_strangers_at_the_port_of_the_key_delay_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vouching, "_ANSWER_S", 3600.0)
    before = set(threading.enumerate())
    vouching.offer_by_munge(OPEN, OFFER, 2, 3600.0)
    (server,) = set(threading.enumerate()) - before
    port = next(port for port in vouching._ports(RUN, 7) if not _is_free(port))
    with ExitStack() as strangers:
        for _ in range(vouching._MOST_GUESTS + 5):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
        garbage = strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
        garbage.sendall(b"\0\0\0\2" + b"x" * 32)  # no thanks of rank 2
        assert [vouching.take_by_munge(OPEN, RUN, ["127.0.0.1"], rank) for rank in (1, 2)] == [OFFER, OFFER]
        server.join(60.0)
        assert not server.is_alive()


def _is_free(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port)):
            return False
    except OSError:
        return True


def test_a_stranger_that_sends_byte_after_byte_is_left_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, received = iter(range(1 << 20)), []
    stranger = MagicMock()
    stranger.__enter__.return_value.recv = lambda _: received.append(b"x") or b"x"  # type: ignore[func-returns-value]
    monkeypatch.setattr(vouching, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(vouching.socket, "create_connection", lambda *_: stranger)
    assert vouching.take_by_munge(OPEN, RUN, ["a"], 1) is None
    assert len(received) < 4 * len(vouching._ports("run", 0))
