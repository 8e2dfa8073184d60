"""A listening socket that is not ours: strangers get in only while somebody is expected."""

from __future__ import annotations

import socket

import pytest

from horovod.transports.doors import Door, listening


def _is_let_in(address: tuple[str, int]) -> bool:
    with socket.socket() as stranger:
        stranger.settimeout(0.5)
        try:
            stranger.connect(address)
        except TimeoutError:
            return False
    return True


def test_nobody_gets_in_while_nobody_is_expected() -> None:
    server, door = Door.of(lambda: socket.create_server(("127.0.0.1", 0)))
    with server:
        address = server.getsockname()
        assert not _is_let_in(address)
        with door.opened(), door.opened():
            friend = socket.create_connection(address)
            guest, _ = server.accept()
            with door.opened():
                assert _is_let_in(address)
            assert _is_let_in(address)
        assert not _is_let_in(address)
        with friend, guest:
            friend.send(b"x")
            assert guest.recv(1) == b"x"


def test_a_socket_that_is_gone_or_unknown_has_no_door() -> None:
    server, door = Door.of(lambda: socket.create_server(("127.0.0.1", 0)))
    server.close()
    with door.opened():
        pass
    pair, door = Door.of(lambda: [socket.create_server(("127.0.0.1", 0)) for _ in range(2)])
    for server in pair:
        assert _is_let_in(server.getsockname())
        server.close()
    assert not listening()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_others_are_listed(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.create_server((host, 0), family=family) as server:
        assert list(listening().values()) == [server.fileno()]
