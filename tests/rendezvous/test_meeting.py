"""Ranks of one host meet; strangers get no answer and have no effect; whoever is missing is named."""

from __future__ import annotations

import ctypes
import errno
import hmac
import itertools
import os
import platform
import resource
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from clocks import let_time_run_out

from horovod import _version
from horovod.errors import HorovodInternalError, InitError, PeerLostError
from horovod.rendezvous import guest as guests
from horovod.rendezvous import messages
from horovod.rendezvous.messages import Meeting
from horovod.rendezvous.names import address_of, current_slot
from horovod.rendezvous.unix import meet
from horovod.world import World

KEY = b"k" * 16
LONG_S, SHORT_S = 120.0, 0.3
_jobs = itertools.count()


@pytest.fixture
def job() -> str:
    return f"test-meeting-{os.getpid()}-{next(_jobs)}"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits as long as it takes for those who are to hear what is wrong."""
    monkeypatch.setattr("horovod.rendezvous.host._LINGER_S", LONG_S)


def _world(job: str, rank: int = 0, size: int = 2, key: bytes = KEY) -> World:
    return World(rank, size, rank, size, 0, 1, f"host{rank}", "horovodrun", job, key)


def _name(job: str) -> str:
    """Where rank 0 listens now."""
    return address_of(_world(job), current_slot())


@pytest.fixture
def one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name stays what it is, however long the test takes."""
    monkeypatch.setattr("horovod.rendezvous.names.time", SimpleNamespace(time=lambda: 7.0))


class Attempt(threading.Thread):
    """One rank, as a thread, on its way to the meeting."""

    def __init__(self, job: str, rank: int, size: int, *, key: bytes = KEY, timeout_s: float = LONG_S) -> None:
        super().__init__()
        self.world = _world(job, rank, size, key)
        self.meeting: Meeting | None = None
        self.error: HorovodInternalError | None = None
        self.arena = os.memfd_create(f"arena{rank}")
        self.control = os.memfd_create("control") if rank == 0 else -1
        self._how = (self.arena, 4096 + rank, self.control, timeout_s)
        self.start()

    def run(self) -> None:
        try:
            self.meeting = meet(self.world, *self._how)
        except HorovodInternalError as error:
            self.error = error

    def done(self) -> HorovodInternalError | None:
        """Wait for the end and close what is ours, as ``init()`` does."""
        self.join(LONG_S + 10)
        assert not self.is_alive()
        if self.meeting is not None:
            fds = {self.meeting.control_fd, *self.meeting.arena_fds, *self.meeting.pid_fds}
            fds -= {self.arena, self.control}
            for fd in fds:
                assert not os.get_inheritable(fd)
                os.close(fd)
        os.close(self.arena)
        if self.control >= 0:
            os.close(self.control)
        return self.error


def _dial(job: str) -> socket.socket:
    """Connect to rank 0 as soon as it listens."""
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(LONG_S)
        try:
            connection.connect(_name(job))
            return connection
        except (ConnectionRefusedError, BlockingIOError):
            connection.close()


def _greeting(rank: int = 1, size: int = 2, key: bytes = KEY, version: str = _version.__version__) -> bytes:
    body = msgspec.msgpack.encode([rank, size, "elsewhere", os.getpid(), version, 4096])
    nonce = secrets.token_bytes(16)
    return hmac.digest(key, b"rank" + nonce + body, "sha256") + nonce + body


def _send(connection: socket.socket, message: bytes, fds: int = 1) -> None:
    lent = [os.memfd_create("arena") for _ in range(fds)]
    try:
        socket.send_fds(connection, [message], lent)
    finally:
        for fd in lent:
            os.close(fd)


def _answer(connection: socket.socket) -> Any:
    assert len(connection.recv(1 << 16)) == 32
    return msgspec.msgpack.decode(connection.recv(1 << 16)[32:])


# -- they meet -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_everybody_gets_everybodys_arena(job: str, size: int) -> None:
    ranks = [Attempt(job, rank, size) for rank in reversed(range(size))][::-1]
    for rank in ranks:
        rank.join(LONG_S)
    inodes = [os.fstat(rank.arena).st_ino for rank in ranks]
    for rank in ranks:
        meeting = rank.meeting
        assert meeting is not None
        assert [os.fstat(fd).st_ino for fd in meeting.arena_fds] == inodes
        assert os.fstat(meeting.control_fd).st_ino == os.fstat(ranks[0].control).st_ino
        assert meeting.arena_bytes == [4096 + r for r in range(size)]
        assert meeting.pids == [os.getpid()] * size
        assert meeting.hosts == [f"host{r}" for r in range(size)]
        assert len(meeting.pid_fds) == size
    assert [rank.done() for rank in ranks] == [None] * size


def test_jobs_at_one_moment_do_not_mix(job: str) -> None:
    teams = [
        [Attempt(name, rank, 2, key=key) for rank in (1, 0)] for name in (job, f"{job}-other") for key in (KEY, b"x")
    ]
    for team in teams:
        for rank in team:
            rank.join(LONG_S)
    for guest, host in teams:
        assert guest.meeting is not None
        assert os.fstat(guest.meeting.arena_fds[0]).st_ino == os.fstat(host.arena).st_ino
    assert [rank.done() for team in teams for rank in team] == [None] * 8


def test_descriptors_wait_until_the_kernel_has_room(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an ordinary user, no more than RLIMIT_NOFILE descriptors may be under way at once."""
    refusals, send_fds = [0] * 3, socket.send_fds

    def reluctant(connection: socket.socket, buffers: Any, fds: Any) -> int:
        if len(fds) > 1 and refusals:
            refusals.pop()
            raise OSError(errno.ETOOMANYREFS, "too many references")
        return send_fds(connection, buffers, fds)

    monkeypatch.setattr(socket, "send_fds", reluctant)
    ranks = [Attempt(job, rank, 3) for rank in range(3)]
    assert [rank.done() for rank in ranks] == [None] * 3
    assert refusals == []


# -- strangers -------------------------------------------------------------------------------------------------------

STRANGERS: dict[str, tuple[bytes, int]] = {
    "one byte": (b"x", 0),
    "short": (b"y" * 40, 0),
    "garbage": (secrets.token_bytes(500), 0),
    "garbage with a descriptor": (secrets.token_bytes(500), 1),
    "a long message": (b"z" * 60_000, 0),
    "another key": (_greeting(key=b"x" * 16), 1),
    "no key": (_greeting(key=b""), 1),
    "a forged digest": (bytes(32) + _greeting()[32:], 1),
    "a changed rank": (_greeting().replace(b"elsewhere", b"elsewherf"), 1),
    "the right key without an arena": (_greeting(), 0),
    "the right key with two descriptors": (_greeting(), 2),
    "the right key with too many descriptors": (_greeting(), 200),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_gets_no_answer_and_has_no_effect(job: str, who: str) -> None:
    message, fds = STRANGERS[who]
    host = Attempt(job, 0, 2)
    with closing(_dial(job)) as stranger:
        _send(stranger, message, fds)
        assert stranger.recv(100) == b""
    guest = Attempt(job, 1, 2)
    assert [guest.done(), host.done()] == [None, None]


def test_silent_strangers_hold_nothing_up(job: str) -> None:
    host = Attempt(job, 0, 2)
    strangers = [_dial(job) for _ in range(20)]
    strangers.pop().close()
    guest = Attempt(job, 1, 2)
    assert [guest.done(), host.done()] == [None, None]
    for stranger in strangers:
        with closing(stranger):
            assert stranger.recv(100) == b""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_gets_no_answer_even_with_the_key(job: str) -> None:
    host = Attempt(job, 0, 2)
    answers: list[bytes | type[BaseException]] = []

    def visit() -> None:
        # The system call itself changes the user of this thread alone.
        number = {"x86_64": 117, "aarch64": 147}[platform.machine()]
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        assert ctypes.CDLL(None).syscall(number, 65534, 65534, 65534) == 0
        with closing(stranger):
            while stranger.connect_ex(_name(job)):
                pass
            try:
                _send(stranger, _greeting())
                answers.append(stranger.recv(100))
            except OSError as error:
                answers.append(type(error))

    visitor = threading.Thread(target=visit)
    visitor.start()
    visitor.join(LONG_S)
    guest = Attempt(job, 1, 2)
    assert [guest.done(), host.done()] == [None, None]
    assert answers in ([b""], [BrokenPipeError], [ConnectionResetError])


def test_a_rank_with_another_key_finds_nobody_and_holds_nothing_up(job: str) -> None:
    host = Attempt(job, 0, 2)
    error = Attempt(job, 1, 2, key=b"x" * 16, timeout_s=SHORT_S).done()
    assert isinstance(error, InitError)
    assert "rank 1 waited 0.3 s for rank 0" in str(error)
    guest = Attempt(job, 1, 2)
    assert [guest.done(), host.done()] == [None, None]


@contextmanager
def _listening(job: str) -> Iterator[socket.socket]:
    """Somebody has the name in place of rank 0."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as listener:
        listener.settimeout(LONG_S)
        listener.bind(_name(job))
        listener.listen()
        yield listener


IMPOSTORS: dict[str, tuple[bytes | None, str]] = {
    "silent": (None, "did not answer: is rank 0 stopped?"),
    "hangs up": (b"", "It hung up"),
    "another key": (b"w" * 32, "does not know the job's key"),
}


@pytest.mark.usefixtures("one_name")
@pytest.mark.parametrize("how", IMPOSTORS)
def test_who_listens_in_place_of_rank_0_is_found_out_and_named(job: str, how: str) -> None:
    reply, said = IMPOSTORS[how]
    with _listening(job) as impostor:
        guest = Attempt(job, 1, 2, timeout_s=SHORT_S)
        connection, _ = impostor.accept()
        with closing(connection):
            if reply is not None:
                connection.recv(1 << 16)
                connection.send(reply) if reply else connection.close()
            impostor.close()
            error = guest.done()
    assert isinstance(error, InitError)
    assert said in str(error)


@pytest.mark.parametrize("how", ["silent", "another user"])
def test_a_name_that_a_stranger_took_is_of_no_use_a_second_later(
    job: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has seen the names of a meeting that failed may bind them before the next."""
    clock = [7.0]
    monkeypatch.setattr("horovod.rendezvous.names.time", SimpleNamespace(time=lambda: clock[0]))
    monkeypatch.setattr("horovod.rendezvous.guest._WELCOME_S", SHORT_S)
    if how == "another user":
        peers = [os.getuid() + 1]
        monkeypatch.setattr("horovod.rendezvous.guest.peer_of", lambda _: (1, peers.pop() if peers else os.getuid()))
    squatters = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    try:
        for slot, squatter in enumerate(squatters, current_slot()):
            squatter.bind(address_of(_world(job), slot))
            squatter.listen()
        host, guest = Attempt(job, 0, 2), Attempt(job, 1, 2)
        # Both have been to the squatter: rank 0 asks it for the key, rank 1 greets it.
        visitors = [squatters[0].accept()[0] for _ in range(2)]
        clock[0] += 2
        assert [guest.done(), host.done()] == [None, None]
        for visitor in visitors:
            visitor.close()
    finally:
        for squatter in squatters:
            squatter.close()


def test_the_name_changes_while_rank_0_waits(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [7.0]
    monkeypatch.setattr("horovod.rendezvous.names.time", SimpleNamespace(time=lambda: clock[0]))
    host = Attempt(job, 0, 3)
    first = Attempt(job, 1, 3)
    _dial(job).close()
    clock[0] += 5
    last = Attempt(job, 2, 3)
    assert [first.done(), last.done(), host.done()] == [None, None, None]


def test_two_thousand_idle_guests_use_up_nothing(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of open files is so low that half of them would be too many."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    host = Attempt(job, 0, 2)
    visit = (
        "import resource, socket, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)\n"
        "from horovod.rendezvous.names import address_of, current_slot\n"
        "from horovod.world import World\n"
        "world = World(0, 2, 0, 2, 0, 1, 'host0', 'horovodrun', sys.argv[1], b'k' * 16)\n"
        "idle = []\n"
        "while len(idle) < 2000:\n"
        "    idle.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))\n"
        "    while idle[-1].connect_ex(address_of(world, current_slot())):\n"
        "        pass\n"
        "print('here', flush=True)\n"
        "sys.stdin.read()\n"
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + 100, limits[1]))
    try:
        with subprocess.Popen(
            [sys.executable, "-c", visit, job], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as crowd:
            assert crowd.stdout is not None
            assert crowd.stdin is not None
            assert crowd.stdout.readline() == b"here\n"
            guest = Attempt(job, 1, 2)
            assert [guest.done(), host.done()] == [None, None]
            crowd.stdin.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _refuse_files(monkeypatch: pytest.MonkeyPatch, whose: type, name: str) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(whose, name, refuse)


@pytest.mark.usefixtures("patient")
def test_rank_0_without_descriptors_says_so_to_all(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    welcomed = threading.Event()
    take_part = guests._take_part
    monkeypatch.setattr(guests, "_take_part", lambda *args: welcomed.set() or take_part(*args))
    host, guest = Attempt(job, 0, 3), Attempt(job, 1, 3)
    assert welcomed.wait(LONG_S)
    _refuse_files(monkeypatch, socket.socket, "accept")
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as third:
        while third.connect_ex(_name(job)):
            pass
        for error in (host.done(), guest.done()):
            assert isinstance(error, InitError)
            assert "may not open more than" in str(error)
            assert "ulimit -n" in str(error)


def test_a_rank_that_cannot_take_what_it_is_given_ends_it_for_all(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse_files(monkeypatch, messages, "receive_fds")  # type: ignore[arg-type]
    for error in [rank.done() for rank in [Attempt(job, 0, 2), Attempt(job, 1, 2)]]:
        assert isinstance(error, InitError)
        assert "rank 1: a rank may not open more than" in str(error)


def test_no_socket_at_all(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse_files(monkeypatch, socket, "socket")  # type: ignore[arg-type]
    for error in [Attempt(job, rank, 2).done() for rank in (0, 1)]:
        assert isinstance(error, InitError)
        assert "ulimit -n" in str(error)


# -- what is wrong with the ranks ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
def test_two_processes_with_one_rank(job: str) -> None:
    host = Attempt(job, 0, 3)
    wanted = f"two processes came as rank 1: pid {os.getpid()} and pid {os.getpid()}"
    with closing(_dial(job)) as first, closing(_dial(job)) as second:
        for twin in (first, second):
            _send(twin, _greeting(rank=1, size=3))
        late = Attempt(job, 2, 3)
        assert [_answer(twin)[1] for twin in (first, second)] == [wanted, wanted]
    for error in (host.done(), late.done()):
        assert isinstance(error, InitError)
        assert str(error) == wanted


def test_ranks_that_believe_in_different_sizes(job: str) -> None:
    host, guest = Attempt(job, 0, 2), Attempt(job, 1, 4)
    for error in (host.done(), guest.done()):
        assert isinstance(error, InitError)
        assert str(error) == "rank 1 believes in 4 ranks, rank 0 in 2"


@pytest.mark.parametrize("rank", [-1, 0, 2])
def test_a_rank_that_cannot_be(job: str, rank: int) -> None:
    host = Attempt(job, 0, 2)
    with closing(_dial(job)) as guest:
        _send(guest, _greeting(rank=rank))
        assert f"came as rank {rank} of 2" in _answer(guest)[1]
    assert f"(pid {os.getpid()}) came as rank {rank} of 2" in str(host.done())


def test_two_versions(job: str) -> None:
    host = Attempt(job, 0, 2)
    with closing(_dial(job)) as guest:
        _send(guest, _greeting(version="0.0.1"))
        wanted = f"rank 1 runs khorovod 0.0.1, rank 0 {_version.__version__}; install one version everywhere"
        assert _answer(guest)[1] == wanted
    assert str(host.done()) == wanted


def test_a_second_rank_0_is_told_so_and_does_no_harm(job: str) -> None:
    first = Attempt(job, 0, 2)
    _dial(job).close()
    error = Attempt(job, 0, 2).done()
    assert isinstance(error, InitError)
    assert f"another process (pid {os.getpid()}) already acts as rank 0 of job '{job}' on host0" in str(error)
    assert "HOROVOD_JOB_ID" in str(error)
    guest = Attempt(job, 1, 2)
    assert [guest.done(), first.done()] == [None, None]


def test_ranks_meet_after_a_meeting_that_failed(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 came twice for nothing, rank 2 once, rank 1 not at all."""
    assert isinstance(Attempt(job, 0, 3, timeout_s=SHORT_S).done(), InitError)
    for error in [
        rank.done() for rank in [Attempt(job, 0, 3, timeout_s=SHORT_S), Attempt(job, 2, 3, timeout_s=SHORT_S)]
    ]:
        assert isinstance(error, InitError)
    ranks = [Attempt(job, rank, 3) for rank in range(3)]
    assert [rank.done() for rank in ranks] == [None] * 3


def test_missing_ranks_are_named_with_the_knob(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    let_time_run_out(monkeypatch.setattr)
    ranks = [Attempt(job, 0, 4), Attempt(job, 2, 4)]
    for error in [rank.done() for rank in ranks]:
        assert isinstance(error, InitError)
        assert f"ranks 1, 3 did not call init() within {LONG_S:g} s" in str(error)
        assert "HOROVOD_START_TIMEOUT" in str(error)


def test_a_missing_rank_0_is_named_with_the_knob(job: str) -> None:
    error = Attempt(job, 1, 2, timeout_s=SHORT_S).done()
    assert isinstance(error, InitError)
    assert f"rank 1 waited 0.3 s for rank 0 of job '{job}' on host1 to call init()" in str(error)
    assert "HOROVOD_START_TIMEOUT" in str(error)


# -- death inside init -----------------------------------------------------------------------------------------------


class Elsewhere:
    """Rank ``rank`` as a process of its own, which has greeted rank 0 and waits."""

    def __init__(self, job: str, rank: int, size: int) -> None:
        come = (
            "import os, sys\n"
            "from horovod.rendezvous.unix import meet\n"
            "from horovod.rendezvous import guest\n"
            "from horovod.world import World\n"
            "rank, size = map(int, sys.argv[2:])\n"
            "take_part = guest._take_part\n"
            "guest._take_part = lambda *a: print('here', flush=True) or take_part(*a)\n"
            "world = World(rank, size, rank, size, 0, 1, 'there', 'horovodrun', sys.argv[1], b'k' * 16)\n"
            "meet(world, os.memfd_create('arena'), 4096, -1, 120.0)\n"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", come, job, str(rank), str(size)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"here\n"

    def kill(self) -> int:
        self.process.kill()
        self.process.communicate()
        return self.process.pid


@pytest.mark.usefixtures("patient")
def test_a_rank_that_dies_inside_init_ends_it_for_all(job: str) -> None:
    host = Attempt(job, 0, 3)
    victim = Elsewhere(job, 2, 3).kill()
    guest = Attempt(job, 1, 3)
    for error in (host.done(), guest.done()):
        assert isinstance(error, PeerLostError)
        assert str(error) == f"rank 2 (pid {victim}) died inside init()"
        assert error.rank == 2


def test_a_rank_that_leaves_init_alive_may_come_back(job: str) -> None:
    host = Attempt(job, 0, 3)
    for _ in range(2):
        with closing(_dial(job)) as fickle:
            _send(fickle, _greeting(rank=2, size=3))
            assert len(fickle.recv(100)) == 32
    ranks = [Attempt(job, rank, 3) for rank in (1, 2)]
    assert [rank.done() for rank in (host, *ranks)] == [None] * 3


def test_a_rank_that_is_gone_before_it_is_heard(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pidfd_open, calls = os.pidfd_open, itertools.count()

    def no_such_process(pid: int) -> int:
        if next(calls) == 1:  # the first is rank 0's own
            raise ProcessLookupError(errno.ESRCH, "no such process")
        return pidfd_open(pid)

    monkeypatch.setattr(os, "pidfd_open", no_such_process)
    # Nobody waits for it once the others are there.
    monkeypatch.setattr("horovod.rendezvous.host._LINGER_S", 10 * LONG_S)
    host = Attempt(job, 0, 3, timeout_s=10 * LONG_S)
    with closing(_dial(job)) as victim:
        _send(victim, _greeting(size=3))
        assert victim.recv(100) == b""
    guest = Attempt(job, 2, 3)
    for error in (host.done(), guest.done()):
        assert isinstance(error, PeerLostError)
        assert "rank 1" in str(error)


@contextmanager
def _rank_0(job: str) -> Iterator[tuple[Attempt, socket.socket, bytes]]:
    """Rank 1, and this test in place of rank 0, which has welcomed it; and what binds its answer to the greeting."""
    with _listening(job) as listener:
        guest = Attempt(job, 1, 2)
        connection, _ = listener.accept()
        with closing(connection):
            message, fds, _, _ = socket.recv_fds(connection, 1 << 16, 1)
            os.close(fds[0])
            nonce = message[32:48]
            connection.send(hmac.digest(KEY, b"welcome" + nonce, "sha256"))
            yield guest, connection, nonce


@pytest.mark.usefixtures("one_name")
def test_rank_0_dies_inside_init(job: str) -> None:
    with _rank_0(job) as (guest, connection, _):
        connection.close()
        error = guest.done()
    assert isinstance(error, PeerLostError)
    assert f"rank 0 (pid {os.getpid()}) ended inside init()" in str(error)
    assert error.rank == 0


@pytest.mark.usefixtures("one_name")
def test_rank_0_dies_between_its_answer_and_the_arenas(job: str) -> None:
    with _rank_0(job) as (guest, connection, nonce):
        hello = [0, 2, "h", 1, _version.__version__, 1]
        body = msgspec.msgpack.encode([[hello, hello], "", -1])
        connection.send(hmac.digest(KEY, b"host" + nonce + body, "sha256") + body)
        _send(connection, b"fds", 2)
        connection.close()
        error = guest.done()
    assert isinstance(error, PeerLostError)
    assert error.rank == 0


@pytest.mark.usefixtures("one_name")
def test_an_answer_that_is_not_signed_is_none(job: str) -> None:
    with _rank_0(job) as (guest, connection, nonce):
        body = msgspec.msgpack.encode([[], "", -1])
        connection.send(hmac.digest(b"wrong", b"host" + nonce + body, "sha256") + body)
        error = guest.done()
    assert isinstance(error, InitError)
    assert "not signed with the job's key" in str(error)


@pytest.mark.usefixtures("one_name")
def test_rank_0_is_stopped(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens, but does not answer; its rank mates give up by themselves, a little later than it would."""
    monkeypatch.setattr("horovod.rendezvous.guest._GRACE_S", SHORT_S)
    with _listening(job):
        error = Attempt(job, 1, 2, timeout_s=SHORT_S).done()
    assert isinstance(error, InitError)
    assert "waited 0.3 s" in str(error)
    assert "is rank 0 stopped?" in str(error)
