"""The hosts of a job meet: leaders as threads, at a service as horovodrun has it, or at rank 0's host."""

from __future__ import annotations

import itertools
import os
import resource
import select
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import zmq
from meetings import KEY, LONG_S, SHORT_S

from horovod import _version
from horovod.errors import HorovodInternalError, InitError, PeerLostError
from horovod.rendezvous import curve, protocol
from horovod.rendezvous.client import FateQuery
from horovod.rendezvous.hosting import end_services
from horovod.rendezvous.hosts import HostEntry, MetHosts, host_id, meet_hosts, prepare, report_failure
from horovod.rendezvous.keys import SERVICE, purpose_key
from horovod.rendezvous.service import Service
from horovod.world import Meeting, World

THREE = ([0, 1], [2], [3, 4])
_runs = itertools.count()


class Leader(threading.Thread):
    """The leader of one host, on its way to the others."""

    def __init__(
        self,
        service: Service | None,
        ranks: list[int],
        size: int,
        *,
        generation: int = 1,
        key: bytes = KEY,
        name: str = "",
        timeout_s: float = LONG_S,
        run: str = "",
        **changes: object,
    ) -> None:
        super().__init__()
        self.met: MetHosts | None = None
        self.error: HorovodInternalError | None = None
        meeting = (
            Meeting("addresses", tuple(service.endpoints), "", True)
            if service
            else Meeting("hosts", ("localhost",), run, True)
        )
        name = name or f"host{ranks[0]}"
        world = World(ranks[0], size, 0, len(ranks), 0, 2, name, "horovodrun", "job", key, meeting)
        entry = HostEntry(name, ranks, [rank + 1000 for rank in ranks], _version.__version__)
        self._how = (world, entry, generation, timeout_s)
        self._changes = changes
        self.start()

    def run(self) -> None:
        try:
            self.met = meet_hosts(*self._how, **self._changes)  # type: ignore[arg-type]
        except HorovodInternalError as error:
            self.error = error

    def done(self) -> MetHosts:
        self.join(LONG_S + 10)
        assert not self.is_alive()
        assert self.error is None
        assert self.met is not None
        return self.met

    def failed(self) -> HorovodInternalError:
        self.join(LONG_S + 10)
        assert not self.is_alive()
        assert self.error is not None, self.met
        return self.error


@pytest.fixture
def service() -> Iterator[Service]:
    with closing(Service(KEY, ["127.0.0.1"], hosts=["a", "a", "b", "c", "c"])) as service:
        yield service


@pytest.fixture
def hosted() -> Iterator[None]:
    """A service in a process of its own ends with the test."""
    yield
    end_services()


def test_what_rank_0_says_right_after_the_meeting_is_left_for_whoever_takes_the_connection(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_joined, has_spoken = threading.Event(), threading.Event()

    def packing(message: protocol.Connected | protocol.GiveUp) -> bytes:
        if isinstance(message, protocol.Connected):
            has_joined.set()
        return protocol.pack(message)

    def slow() -> None:
        if has_joined.is_set():
            has_spoken.wait(LONG_S)

    monkeypatch.setattr("horovod.rendezvous.hosts.pack", packing)
    leaders = [Leader(service, [0], 2), Leader(service, [1], 2, check=slow)]
    home = leaders[0].done()
    for text in (b"first", b"second"):
        home.socket.send_multipart([host_id(1), text])
    has_spoken.set()
    guest = leaders[1].done()
    try:
        for text in (b"first", b"second"):
            assert guest.socket.poll(LONG_S * 1000)
            assert guest.socket.recv() == text
    finally:
        for each in (home, guest):
            each.socket.context.destroy()


def _talk(leaders: list[Leader]) -> None:
    """Everybody reaches rank 0's leader, and it everybody; then all is closed."""
    found = [leader.done() for leader in leaders]
    try:
        home = next(each for each in found if each.index == 0)
        assert [each.entries for each in found] == [home.entries] * len(found)
        assert sorted(each.index for each in found) == list(range(len(found)))
        for each in found:
            if each is not home:
                each.socket.send(b"from %d" % each.index)
                assert home.socket.poll(LONG_S * 1000)
                assert home.socket.recv_multipart() == [host_id(each.index), b"from %d" % each.index]
                home.socket.send_multipart([host_id(each.index), b"to %d" % each.index])
                assert each.socket.poll(LONG_S * 1000)
                assert each.socket.recv() == b"to %d" % each.index
    finally:
        for each in found:
            each.socket.context.destroy()


def test_hosts_meet_again_and_again_whoever_comes_first(service: Service) -> None:
    for number, order in enumerate(itertools.permutations(THREE), 1):
        leaders = [Leader(service, ranks, 5, generation=number) for ranks in order]
        _talk(leaders)
        found = leaders[0].done()
        assert [entry.ranks for entry in found.entries] == list(THREE)
        assert [entry.hostname for entry in found.entries] == ["host0", "host2", "host3"]
        assert all(entry.addresses for entry in found.entries)
        assert found.where.startswith("tcp://")


@pytest.mark.usefixtures("hosted")
def test_the_host_of_rank_0_is_the_place_where_nobody_else_is() -> None:
    run = f"torchrun/{os.getpid()}/{next(_runs)}"
    _talk([Leader(None, ranks, 3, run=run) for ranks in ([0], [2], [1])])


def test_of_several_addresses_the_one_that_answers_counts(service: Service) -> None:
    with closing(Service(b"another job's", ["127.0.0.1"])) as stranger:
        wrong = [*stranger.endpoints, "tcp://127.0.0.1:9", "tcp://[::1]:9", "tcp://nowhere.invalid:5"]
        service.endpoints = [*wrong, *service.endpoints]
        _talk([Leader(service, ranks, 5) for ranks in THREE])


def test_who_does_not_come_is_named_with_its_ranks(service: Service) -> None:
    waiting = [Leader(service, THREE[0], 5, timeout_s=SHORT_S), Leader(service, THREE[1], 5, timeout_s=LONG_S)]
    texts = {str(leader.failed()) for leader in waiting}
    assert len(texts) == 1, "who waits longer hears of it at once"
    assert "ranks 3, 4 of host c" in texts.pop().replace("rank 2 of host b; ", "")
    _talk([Leader(service, ranks, 5) for ranks in THREE])


def test_a_rank_that_ended_before_ends_the_waiting(service: Service) -> None:
    first = Leader(service, THREE[0], 5)
    service.ended(3, "rank 3 (pid 7) on host c", "ended with exit code 0")
    later = Leader(service, THREE[1], 5)
    for leader in (first, later):
        error = leader.failed()
        assert isinstance(error, PeerLostError)
        assert error.rank == 3
        assert str(error) == "rank 3 (pid 7) on host c ended with exit code 0 before its init() was done"


def test_a_rank_that_dies_on_a_host_that_waits_is_told_to_all(service: Service) -> None:
    def check() -> None:
        raise PeerLostError("rank 1 (pid 5) on host a was killed by SIGKILL", rank=1)

    others = [Leader(service, ranks, 5) for ranks in THREE[1:2]]
    failing = Leader(service, THREE[0], 5, check=check)
    assert isinstance(failing.failed(), PeerLostError)
    service.ended(1, "rank 1 (pid 5) on host a", "was killed by SIGKILL")
    for other in others:
        error = other.failed()
        assert isinstance(error, PeerLostError)
        assert error.rank == 1


def test_what_became_of_a_rank_is_told_to_who_asks_with_the_key(service: Service) -> None:
    places = ["tcp://127.0.0.1:9", *service.endpoints]
    with closing(FateQuery(places, KEY, 3)) as query, closing(FateQuery(places, b"x" * 16, 3)) as stranger:
        service.ended(1, "rank 1 (pid 5) on host a", "ended with exit code 0")
        assert query.news() == ""
        service.ended(3, "rank 3 (pid 7) on host c", "was killed by SIGKILL")
        pause, deadline = threading.Event(), time.monotonic() + LONG_S
        while not (how := query.news()) and time.monotonic() < deadline:
            pause.wait(0.01)
        assert how == "was killed by SIGKILL"
        assert stranger.news() == ""


def test_hosts_of_one_name_are_two_hosts(service: Service) -> None:
    leaders = [Leader(service, ranks, 5, name="node") for ranks in THREE]
    _talk(leaders)
    assert [(entry.hostname, entry.ranks) for entry in leaders[0].done().entries] == [("node", list(r)) for r in THREE]


def test_another_version_is_told_to_all(service: Service) -> None:
    waiting = Leader(service, THREE[1], 5)
    own = protocol.pack(protocol.GiveUp(1, b"", protocol.Refusal()))
    other = own.replace(_version.__version__.encode(), b"9" * len(_version.__version__))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with curve.client_socket(context, purpose_key(KEY, SERVICE)) as client:
        client.connect(service.endpoints[0])
        while waiting.is_alive():  # it may not have come yet
            client.send(other)
            assert client.poll(LONG_S * 1000)
            refusal = protocol.unpack(client.recv(), protocol.Refusal)
            assert "has khorovod 99" in refusal.error
            waiting.join(0.05)
    context.destroy()
    assert _version.__version__ in str(waiting.failed())


@pytest.mark.parametrize(
    ("second", "size", "text"),
    [([1, 2], 5, "two processes that are rank 1"), ([2], 6, "job of 6 ranks")],
)
def test_hosts_that_do_not_fit_are_told_why(service: Service, second: list[int], size: int, text: str) -> None:
    both = [Leader(service, THREE[0], 5), Leader(service, second, size)]
    for leader in both:
        assert text in str(leader.failed())


def test_a_leader_that_reads_late_still_learns_why_there_is_no_job() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    service = Service(KEY, ["127.0.0.1"])
    late = curve.client_socket(context, purpose_key(KEY, SERVICE))
    late.connect(service.endpoints[0])
    assert late.poll(LONG_S * 1000, zmq.POLLOUT)
    entry = HostEntry("late", [7], [1007], _version.__version__)
    late.send(protocol.pack(protocol.Join(1, 5, b"nonce", entry, [])))
    assert select.select([late.fd], [], [], LONG_S)[0]  # it has come, and nobody has looked
    closing = threading.Thread(target=service.close)
    closing.start()
    closing.join(0.1)
    assert late.poll(LONG_S * 1000)
    refusal = protocol.unpack(late.recv(), protocol.Refusal)
    assert "job has a size of 5" in refusal.error
    context.destroy()
    closing.join(LONG_S)
    assert not closing.is_alive()


def test_a_rank_outside_the_job_is_told_so(service: Service) -> None:
    assert "rank 7, and the job has a size of 5" in str(Leader(service, [7], 5).failed())


def test_a_leader_that_cannot_reach_rank_0_hears_that_its_host_has_given_up(service: Service) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    leader = Leader(service, [1], 2)
    entry = HostEntry("host0", [0], [1000], _version.__version__)
    with curve.client_socket(context, purpose_key(KEY, SERVICE)) as socket:
        socket.connect(service.endpoints[0])
        assert socket.poll(LONG_S * 1000, zmq.POLLOUT)
        answer = None
        while not isinstance(answer, protocol.AllHere):
            # Nobody listens at the discard port.
            socket.send(protocol.pack(protocol.Join(1, 2, b"nonce", entry, ["tcp://127.0.0.2:9"], "", ())))
            while socket.poll(1000):
                answer = protocol.unpack(socket.recv(), protocol.StillMissing | protocol.AllHere)  # type: ignore[arg-type]
        began_s = time.monotonic()
        socket.send(protocol.pack(protocol.GiveUp(1, b"nonce", protocol.Refusal("rank 0 has had enough", 0))))
        error = leader.failed()
    context.destroy()
    assert isinstance(error, PeerLostError)
    assert "rank 0 has had enough" in str(error)
    assert time.monotonic() - began_s < LONG_S / 4


def test_nobody_without_the_key_can_meet(service: Service) -> None:
    error = Leader(service, THREE[0], 5, key=b"x" * 16, timeout_s=SHORT_S).failed()
    assert "cannot reach the job service at tcp://127.0.0.1" in str(error)
    _talk([Leader(service, ranks, 5) for ranks in THREE])


def test_a_name_that_cannot_be_resolved_is_the_cause_that_is_named() -> None:
    """As of pods without a headless Service, or nodes that only the scheduler knows."""
    meeting = Meeting("hosts", ("train-0.train.invalid",), "r", True)
    world = World(1, 2, 0, 1, 1, 2, "b", "kubernetes", "job", KEY, meeting)
    entry = HostEntry("b", [1], [1001], _version.__version__)
    with pytest.raises(InitError, match=r"on train-0\.train\.invalid .* This host cannot resolve the name"):
        meet_hosts(world, entry, 1, SHORT_S)


def test_ranks_of_several_hosts_need_a_place_and_a_secret() -> None:
    world = World(0, 4, 0, 2, 0, 2, "a", "torchrun", "job", KEY, Meeting("hosts", ("a",), "r"))
    with pytest.raises(InitError, match=r"export HOROVOD_SECRET_KEY=\$\(openssl rand -hex 32\)"):
        prepare(world, 1.0)
    with pytest.raises(InitError, match="nothing says where they meet"):
        prepare(replace(world, meeting=Meeting()), 1.0)
    for fine in (replace(world, local_size=4), replace(world, meeting=replace(world.meeting, has_key=True))):
        assert prepare(fine, 1.0) is fine


@pytest.mark.usefixtures("hosted")
@pytest.mark.parametrize("failed", ["rank 0's host", "another host"])
def test_a_host_whose_ranks_did_not_find_each_other_is_no_more_waited_for(failed: str) -> None:
    run = f"torchrun/{os.getpid()}/{next(_runs)}"
    here, host, others = ([0, 1], 0, ([2], [3, 4])) if failed == "rank 0's host" else ([3, 4], 1, ([0, 1], [2]))
    world = World(
        here[0], 5, 0, 2, host, 2, "gone", "torchrun", "job", KEY, Meeting("hosts", ("localhost",), run, True)
    )
    # Those who come first wait; one comes when it is said already.
    leaders = [Leader(None, others[0], 5, run=run)]
    telling = threading.Thread(target=report_failure, args=(world, 1, PeerLostError("rank 1 of host gone has ended")))
    telling.start()
    leaders.append(Leader(None, others[1], 5, run=run))
    for leader in leaders:
        error = leader.failed()
        assert isinstance(error, PeerLostError)
        assert "rank 1 of host gone has ended" in str(error)
    telling.join(LONG_S)
    assert not telling.is_alive()


def test_a_service_that_has_no_file_left_for_some_rank_says_so_at_once() -> None:
    """Else libzmq would let those ranks wait, which would blame a firewall."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, before[1]))
    try:
        with pytest.raises(OSError, match=r"more than 500 files .* ranks need 620 more; .*: ulimit -n 4096"):
            Service(KEY, ["127.0.0.1"], hosts=["a"] * 600)
        with closing(Service(KEY, ["127.0.0.1"], hosts=["a"] * 6)):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
