"""Between hosts: who has not the job's key has no effect, whatever it sends."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import zmq

from horovod.rendezvous import curve

KEY = bytes(range(32))
LONG_MS = 60_000
Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy()


@contextlib.contextmanager
def _listening(
    context: Context, address: str = "127.0.0.1", max_bytes: int = curve.MAX_BYTES
) -> Iterator[tuple[Socket, str]]:
    with curve.server_socket(context, KEY, max_bytes=max_bytes) as server:
        port = server.bind_to_random_port(f"tcp://{address}")
        yield server, f"tcp://{address}:{port}"


def _exchange(context: Context, server: Socket, address: str, text: bytes = b"hello") -> None:
    """Somebody with the key is heard, first of all, and answered."""
    with curve.client_socket(context, KEY, routing_id=b"host-1") as client:
        client.connect(address)
        assert client.poll(LONG_MS, zmq.POLLOUT)
        client.send(text)
        assert server.poll(LONG_MS)
        assert server.recv_multipart() == [b"host-1", text]
        server.send_multipart([b"host-1", b"and back"])
        assert client.poll(LONG_MS)
        assert client.recv() == b"and back"


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]"])
def test_processes_with_the_key_hear_each_other(context: Context, address: str) -> None:
    with _listening(context, address) as (server, where):
        _exchange(context, server, where)


def test_the_last_word_is_read_before_the_connection_ends(context: Context) -> None:
    guests: Context = zmq.Context()
    with _listening(context) as (server, where):
        slow = curve.client_socket(guests, KEY, routing_id=b"slow")
        slow.connect(where)
        assert slow.poll(LONG_MS, zmq.POLLOUT)
        slow.send(b"come")
        assert server.poll(LONG_MS)
        server.recv_multipart()
        server.send_multipart([b"slow", b"last word"])
        parting = threading.Thread(target=curve.part, args=(server, [b"slow", b"gone already"], b"still there?"))
        parting.start()
        parting.join(0.1)
        assert slow.poll(LONG_MS)
        assert slow.recv() == b"last word"
        guests.destroy()
        parting.join(LONG_MS / 1000)
        assert not parting.is_alive()


def test_nobody_stays_for_ever_for_one_who_does_not_go(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "_PART_S", 0.1)
    with _listening(context) as (server, where):
        _exchange(context, server, where)
        with curve.client_socket(context, KEY, routing_id=b"host-2") as client:
            client.connect(where)
            assert client.poll(LONG_MS, zmq.POLLOUT)
            client.send(b"come")
            assert server.poll(LONG_MS)
            server.recv_multipart()
            curve.part(server, [b"host-2"], b"still there?")
            assert client.poll(LONG_MS)
            assert client.recv() == b"still there?"


def test_a_socket_needs_a_secret(context: Context) -> None:
    with pytest.raises(ValueError, match="secret"):
        curve.server_socket(context, b"")


def _another_key(context: Context) -> Socket:
    return curve.client_socket(context, KEY[:-1])


def _no_key(context: Context) -> Socket:
    return context.socket(zmq.DEALER)


def _a_password(context: Context) -> Socket:
    client: Socket = context.socket(zmq.DEALER)
    client.plain_username, client.plain_password = b"root", b"root"
    return client


@pytest.mark.parametrize("make", [_another_key, _no_key, _a_password])
def test_a_client_without_the_key_has_no_effect(context: Context, make: Callable[[Context], Socket]) -> None:
    with _listening(context) as (server, where):
        strangers: Context = zmq.Context()
        for _ in range(2):
            client = make(strangers)
            client.linger = 0
            failed = client.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            client.connect(where)
            if make is not _another_key:
                client.send(b"let me in")
            assert failed.poll(LONG_MS)
            client.disable_monitor()
            failed.close()
            client.close()
        _exchange(context, server, where)
        strangers.destroy()
        assert not server.poll(0)


def _send_raw(where: str, data: bytes) -> None:
    """Send bytes to a port, and wait until the other end hangs up."""
    with socket.create_connection(("127.0.0.1", int(where.rpartition(":")[2]))) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1000):
                pass


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", secrets.token_bytes(70_000), b"\xff" * 9 + b"\x7f", b"\xff" + bytes(8) + b"\x7f\x03"],
    ids=["http", "noise", "half a greeting", "old"],
)
def test_garbage_has_no_effect(context: Context, data: bytes) -> None:
    with _listening(context) as (server, where):
        _send_raw(where, data)
        _exchange(context, server, where)
        assert not server.poll(0)


def test_what_went_over_the_wire_is_worth_nothing_when_it_is_sent_again(context: Context) -> None:
    with _listening(context) as (server, where):
        with socket.create_server(("127.0.0.1", 0)) as middle:
            with curve.client_socket(context, KEY) as client:
                client.connect(f"tcp://127.0.0.1:{middle.getsockname()[1]}")
                recorded = _relay(middle, int(where.rpartition(":")[2]), client, server)
        _send_raw(where, recorded)
        _exchange(context, server, where)
        assert not server.poll(0)


def _relay(middle: socket.socket, port: int, client: Socket, server: Socket) -> bytes:
    """Listen in on one message; what the client has sent."""
    recorded = b""
    middle.settimeout(LONG_MS / 1000)
    near, _ = middle.accept()
    with near, socket.create_connection(("127.0.0.1", port)) as far:
        near.settimeout(0.01)
        far.settimeout(0.01)
        has_sent = False
        while not server.poll(0):
            for source, target in ((near, far), (far, near)):
                try:
                    data = source.recv(4096)
                except TimeoutError:
                    continue
                target.sendall(data)
                recorded += data if source is near else b""
            if not has_sent and client.poll(0, zmq.POLLOUT):
                client.send(b"a secret of ours")
                has_sent = True
    assert server.recv_multipart()[1] == b"a secret of ours"
    assert b"a secret of ours" not in recorded
    return recorded


def test_a_message_that_is_too_large_ends_its_connection_alone(context: Context) -> None:
    with _listening(context, max_bytes=1000) as (server, where):
        with curve.client_socket(context, KEY) as client:
            monitor = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            client.connect(where)
            client.send(bytes(5000))
            assert monitor.poll(LONG_MS)
            client.disable_monitor()
            monitor.close()
        _exchange(context, server, where)
        assert not server.poll(0)
