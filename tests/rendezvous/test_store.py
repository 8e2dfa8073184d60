"""The table that the ranks of a job share: what one sets the others get, with limits on every wait."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from horovod._version import __version__
from horovod.rendezvous import curve
from horovod.rendezvous.client import JobStore
from horovod.rendezvous.keys import SERVICE, local_name, purpose_key
from horovod.rendezvous.protocol import Table, Value, number_of, pack, unpack
from horovod.rendezvous.service import Service

KEY = secrets.token_bytes(32)
LONG_S = 60.0


@pytest.fixture
def server() -> Iterator[Service]:
    server = Service(KEY, ["127.0.0.1", local_name(KEY, "job 1")])
    yield server
    server.close()


@pytest.fixture
def client(server: Service) -> Iterator[JobStore]:
    client = JobStore(KEY, lambda: server.endpoints, "", LONG_S)
    yield client
    client.close()


def test_what_one_sets_the_others_get(server: Service, client: JobStore) -> None:
    for endpoint in server.endpoints:
        other = JobStore(KEY, lambda: [endpoint], "", LONG_S)
        client.set("a", b"\0\xff")
        assert other.get("a") == b"\0\xff"
        assert other.check("a") and not other.check("b")
        assert other.add("n", 2) + client.add("n", 3) in (7, 17)
        other.close()


def test_who_waits_gets_what_is_set_later(server: Service, client: JobStore) -> None:
    found: list[bytes] = []
    other = JobStore(KEY, lambda: server.endpoints, "", LONG_S)
    thread = threading.Thread(target=lambda: found.append(other.get("late")))
    thread.start()
    client.set("late", b"x")
    thread.join()
    other.wait(["late"])
    other.close()
    assert found == [b"x"]


def test_a_wait_has_a_limit_and_its_late_answer_is_no_answer_to_the_next_question(client: JobStore) -> None:
    with pytest.raises(TimeoutError, match=r"'never' within 0.01 s"):
        client.get("never", timeout_s=0.01)
    client.set("never", b"too late")
    client.set("other", b"y")
    assert client.get("other") == b"y"


def test_who_asks_again_and_again_waits_once(server: Service, client: JobStore) -> None:
    for _ in range(3):
        with pytest.raises(TimeoutError):
            client.get("never", timeout_s=0.01)
    assert not client.check("never")  # so it has taken the questions
    assert [len(waiting) for waiting in server._parked.values()] == [1]


def test_who_waits_is_released_when_the_client_is_closed(server: Service) -> None:
    client, errors = JobStore(KEY, lambda: server.endpoints, "", LONG_S), []

    def wait() -> None:
        try:
            client.get("never")
        except ConnectionError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    client.close()
    thread.join()
    assert len(errors) == 1


def test_the_first_address_that_answers_is_taken(server: Service) -> None:
    # Nobody listens at the discard port of another loopback address.
    client = JobStore(KEY, lambda: ["tcp://127.0.0.2:9", *server.endpoints[:1]], "", LONG_S)
    assert client.endpoint == server.endpoints[0]
    client.close()


def test_without_the_secret_there_is_no_answer(server: Service, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TimeoutError, match=r"no job service answers at tcp://127.0.0.1:\d+ within 0.5 s"):
        JobStore(KEY[:-1], lambda: server.endpoints[:1], "", 0.5)


def test_what_is_no_question_has_no_effect(server: Service, client: JobStore) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with curve.client_socket(context, purpose_key(KEY, SERVICE)) as socket:
        socket.connect(server.endpoints[0])
        wrong = msgspec.msgpack.encode([__version__, 1, msgspec.msgpack.encode(["table", "destroy", "a"])])
        for frames in ([b"\xc1"], [wrong], [b"a", b"b"], [b""]):
            assert socket.poll(LONG_S * 1e3, zmq.POLLOUT)
            socket.send_multipart(frames)
        socket.send(pack(Table("check", "a"), 7))
        assert socket.poll(LONG_S * 1e3)
        answer = socket.recv()
        assert (number_of(answer), unpack(answer, Value)) == (7, Value())
    context.destroy()
    client.set("a", b"1")
    assert client.get("a") == b"1"


def test_an_address_that_is_not_there_is_left_out() -> None:
    with pytest.raises(OSError, match=r"cannot listen at 192.0.2.1: "):
        Service(KEY, ["192.0.2.1"])
    server = Service(KEY, ["192.0.2.1", "127.0.0.1"])
    assert len(server.endpoints) == 1
    server.close()
