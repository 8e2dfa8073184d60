"""A listening socket that is not ours: strangers get in only while somebody is expected."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from horovod.transports import socket_filter
from horovod.transports.socket_filter import SocketFilter, listening


def _is_let_in(address: tuple[str, int]) -> bool:
    with socket.socket() as stranger:
        stranger.settimeout(0.5)
        try:
            stranger.connect(address)
        except TimeoutError:
            return False
    return True


def test_nobody_gets_in_while_nobody_is_expected() -> None:
    server, packets = SocketFilter.of(lambda: socket.create_server(("127.0.0.1", 0)))
    with server:
        address = server.getsockname()
        assert not _is_let_in(address)
        with packets.lifted(), packets.lifted():
            friend = socket.create_connection(address)
            guest, _ = server.accept()
            with packets.lifted():
                assert _is_let_in(address)
            assert _is_let_in(address)
        assert not _is_let_in(address)
        with friend, guest:
            friend.send(b"x")
            assert guest.recv(1) == b"x"


def test_a_socket_that_is_gone_or_unknown_is_not_filtered() -> None:
    server, packets = SocketFilter.of(lambda: socket.create_server(("127.0.0.1", 0)))
    server.close()
    with packets.lifted():
        pass
    pair, packets = SocketFilter.of(lambda: [socket.create_server(("127.0.0.1", 0)) for _ in range(2)])
    for server in pair:
        assert _is_let_in(server.getsockname())
        server.close()
    assert not listening()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_others_are_listed(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.create_server((host, 0), family=family) as server:
        assert list(listening().values()) == [server.fileno()]


def test_a_socket_that_another_thread_closes_meanwhile_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    closing = socket.create_server(("127.0.0.1", 0))
    victim = closing.detach()
    borrowed = socket_filter._borrowed

    @contextlib.contextmanager
    def closed_meanwhile(fd: int) -> Iterator[socket.socket]:
        with borrowed(fd) as sock:
            if fd == victim:
                os.close(fd)
            yield sock

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(socket_filter, "_borrowed", closed_meanwhile)
        assert list(listening().values()) == [server.fileno()]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(victim)
