"""The connections between hosts: every frame in order and once; what is none has no effect, and is logged once."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq

from horovod.links.hosts import frames, wire
from horovod.links.hosts.wire import Wire
from horovod.rendezvous import curve
from horovod.rendezvous.hosts import host_id

LONG_S = 120.0
KEY = b"k" * 32
IDS = [host_id(0), host_id(1), host_id(2)]


class End:
    """One end of the connections of a host, and what it has heard."""

    def __init__(self, socket: zmq.Socket[bytes], index: int) -> None:
        self.socket, self.index = socket, index
        self.heard: list[tuple[int, frames.Message]] = []
        self.lost: dict[int, str] = {}
        self.wire = Wire(socket, IDS, index, lambda host, message: self.heard.append((host, message)), self._lose)

    def _lose(self, host: int, why: str) -> None:
        self.lost[host] = why
        self.wire.lost.add(host)

    def until(self, is_over: Callable[[], bool]) -> None:
        """Let it work until something holds."""
        poll = zmq.Poller()
        poll.register(self.wire.fd, zmq.POLLIN)
        for _ in range(int(LONG_S * 100)):
            self.wire.pump()
            if is_over():
                return
            poll.poll(10)
        raise AssertionError(f"host {self.index} has heard {self.heard}, lost {self.lost}")


@contextmanager
def _hub(hwm: int = 0) -> Iterator[tuple[End, Callable[[int], zmq.Socket[bytes]]]]:
    """Rank 0's leader, and what connects the leader of another host with it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = []
    try:
        server = curve.server_socket(context, KEY)
        if hwm:
            server.sndhwm = hwm
        port = server.bind_to_random_port("tcp://127.0.0.1")
        hub = End(server, 0)

        def connect(index: int) -> zmq.Socket[bytes]:
            client = curve.client_socket(context, KEY, routing_id=host_id(index))
            if hwm:
                client.rcvhwm = hwm
                client.rcvbuf = 1 << 16
            sockets.append(client)
            client.connect(f"tcp://127.0.0.1:{port}")
            assert client.poll(LONG_S * 1000, zmq.POLLOUT)
            return client

        yield hub, connect
    finally:
        context.destroy()


def _together(hub: End, other: End, is_over: Callable[[], bool]) -> None:
    """Let both work until something holds."""
    poll = zmq.Poller()
    poll.register(other.wire.fd, zmq.POLLIN)
    for _ in range(int(LONG_S * 1000)):
        hub.wire.pump()
        other.wire.pump()
        if is_over():
            return
        poll.poll(1)
    raise AssertionError("it did not come to pass")


def _pings(count: int) -> list[frames.Message]:
    return [frames.Ping(number) for number in range(count)]


def _frame(number: int, *messages: frames.Message) -> bytes:
    return frames.numbered(number, frames.encode(messages))


def test_what_several_threads_say_arrives_whole_and_each_in_its_order() -> None:
    with _hub() as (hub, connect):
        ends = [End(connect(index), index) for index in (1, 2)]

        def talk(end: End, sign: int) -> None:
            for number in range(0, 200, 4):
                end.wire.post([0], [frames.Pong(sign, number + i) for i in range(4)])

        threads = [threading.Thread(target=talk, args=(end, sign)) for end in ends for sign in (7, 8)]
        for thread in threads:
            thread.start()
        hub.until(lambda: len(hub.heard) == 800)
        for thread in threads:
            thread.join()
        for host in (1, 2):
            for sign in (7, 8):
                numbers = [
                    m.at_ns for h, m in hub.heard if h == host and isinstance(m, frames.Pong) and m.sent_ns == sign
                ]
                assert numbers == list(range(200))
        hub.wire.post([1, 2], _pings(3))
        for end in ends:
            end.until(lambda end=end: len(end.heard) == 3)  # type: ignore[misc]
            assert end.heard == [(0, ping) for ping in _pings(3)]


def test_more_messages_than_a_frame_holds_go_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    with _hub() as (hub, connect):
        end = End(connect(1), 1)
        monkeypatch.setattr(frames, "MAX_ITEMS", 4)
        end.wire.post([0], _pings(10))
        hub.until(lambda: len(hub.heard) == 10)
        assert [message for _, message in hub.heard] == _pings(10)


@pytest.mark.parametrize(
    "said",
    [[_frame(0, frames.Ping(0))], [b""], [b"short"], [_frame(1, frames.Ping(1)), b"more"], []],
    ids=["a frame again", "nothing", "too short", "two parts", "no part"],
)
def test_what_is_no_frame_or_comes_again_has_no_effect_and_is_logged_once(
    said: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with _hub() as (hub, connect), caplog.at_level(logging.WARNING, "horovod"):
        client = connect(1)
        client.send(_frame(0, frames.Ping(0)))
        for _ in range(5):
            client.send_multipart(said or [b""])
        client.send(_frame(1, frames.Ping(1)))
        hub.until(lambda: len(hub.heard) == 2)
        assert hub.heard == [(1, frames.Ping(0)), (1, frames.Ping(1))]
        assert not hub.lost
        assert [record.message for record in caplog.records if "ignored" in record.message] == [
            "between hosts: data from host 1 is not a frame, or repeats one; it is ignored. Further ones are not logged"
        ]


def test_a_process_that_is_no_host_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    with _hub() as (hub, connect), caplog.at_level(logging.WARNING, "horovod"):
        for name in (9, 0):
            connect(name).send(_frame(0, frames.RankState(1, 4)))
        end = End(connect(1), 1)
        end.wire.post([0], _pings(1))
        hub.until(lambda: len(hub.heard) == 1 and bool(caplog.records))
        assert hub.heard == [(1, frames.Ping(0))]
        assert not hub.lost


def test_who_takes_the_name_of_a_host_that_is_connected_is_not_heard() -> None:
    with _hub() as (hub, connect):
        end = End(connect(1), 1)
        thief = connect(1)
        thief.send(_frame(0, frames.RankState(1, 4)))
        end.wire.post([0], _pings(2))
        hub.until(lambda: len(hub.heard) == 2)
        hub.wire.post([1], _pings(1))
        end.until(lambda: len(end.heard) == 1)
        assert not thief.poll(0)
        assert hub.heard == [(1, ping) for ping in _pings(2)]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (_frame(3, frames.Ping(3)), "frame 1 is missing; received frame 3"),
        (frames.numbered(1, b"\xc1 garbage"), "frame 1 cannot be decoded: "),
    ],
    ids=["a frame is missing", "a frame is garbage"],
)
def test_a_host_of_which_something_was_lost_is_given_up(said: bytes, why: str) -> None:
    with _hub() as (hub, connect):
        client, other = connect(1), End(connect(2), 2)
        client.send(_frame(0, frames.Ping(0)))
        client.send(said)
        client.send(_frame(1, frames.Ping(1)))
        hub.until(lambda: bool(hub.lost))
        assert hub.lost[1].startswith(why)
        other.wire.post([0], _pings(1))
        hub.until(lambda: len(hub.heard) == 2)
        assert hub.heard == [(1, frames.Ping(0)), (2, frames.Ping(0))], "the others are heard as before"


def test_a_host_that_takes_nothing_is_given_up_before_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_MOST_WAITING", 4 << 20)
    with _hub(hwm=2) as (hub, connect):
        connect(1)  # and reads nothing
        reader = End(connect(2), 2)
        text, sent = [frames.Trace(1, os.urandom(1 << 18))], 0
        while 1 not in hub.lost and sent < 500:
            hub.wire.post([1, 2], text)
            sent += 1
            _together(hub, reader, lambda: len(reader.heard) == sent)
        assert hub.lost == {1: "it does not read its messages"}
        assert sent < 200, "what the kernel and ZeroMQ keep is limited, too"
        hub.wire.post([2], _pings(1))
        _together(hub, reader, lambda: len(reader.heard) == sent + 1)


def test_the_last_word_of_both_is_heard_before_either_closes() -> None:
    with _hub() as (hub, connect):
        end = End(connect(1), 1)
        connect(2).send(_frame(0, frames.Bye(leaves=False)))
        end.wire.post([0], _pings(50))
        thread = threading.Thread(target=end.wire.close)
        thread.start()
        hub.until(lambda: len(hub.heard) == 51)
        assert hub.heard[-1] == (1, frames.Bye())
        hub.wire.close()
        thread.join(LONG_S)
        assert not thread.is_alive()
        assert not hub.lost and not end.lost
        hub.wire.post([1, 2], _pings(1))  # after the end: nothing happens


def test_who_leaves_first_hears_the_hub_before_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_PART_S", LONG_S)
    for _ in range(20):  # what a socket was given last arrives most of the time
        with _hub() as (hub, connect):
            end = End(connect(1), 1)
            hub.wire.lost.add(2)
            thread = threading.Thread(target=end.wire.close)
            thread.start()
            hub.until(lambda: bool(hub.heard))
            hub.wire.close()
            thread.join(LONG_S / 2)
            assert not thread.is_alive()


def test_the_hub_does_not_wait_for_a_host_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_PART_S", 10 * LONG_S)
    with _hub() as (hub, connect):
        end = End(connect(1), 1)
        hub.wire.lost.add(2)
        thread = threading.Thread(target=hub.wire.close)
        thread.start()
        end.until(lambda: bool(end.heard))
        assert end.heard == [(0, frames.Bye())]
        thread.join(LONG_S)
        assert not thread.is_alive()
        end.wire.close()


def test_a_host_that_is_gone_does_not_keep_the_others_from_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_PART_S", 0.05)
    with _hub() as (hub, connect):
        connect(1)  # stopped: it never answers
        hub.wire.lost.add(2)
        hub.wire.post([1], _pings(3))
        hub.wire.close()
        assert hub.socket.closed


@pytest.mark.parametrize("is_known", [True, False])
def test_a_host_that_is_known_to_have_ended_is_not_waited_for(is_known: bool) -> None:
    """It is silent, but its connection stands: its cable was cut."""
    with _hub() as (hub, connect):
        connect(1)
        hub.wire.lost.add(2)
        asked: list[int] = []

        def has_ended(host: int) -> bool:
            asked.append(host)
            return is_known

        hub.wire.close(has_ended)
        assert (1 in hub.wire.lost) == is_known
        assert set(asked) == {1} and (len(asked) == 1) == is_known
