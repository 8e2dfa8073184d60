"""Ranks of one host meet; strangers get no answer and have no effect; whoever is missing is named."""

from __future__ import annotations

import ctypes
import errno
import hmac
import itertools
import os
import platform
import secrets
import socket
import threading
from contextlib import closing
from typing import Any

import msgspec
import pytest
from clocks import let_time_run_out

from horovod import _version
from horovod.errors import HorovodInternalError, InitError, PeerLostError
from horovod.rendezvous import unix
from horovod.rendezvous.unix import Meeting, address_of, meet
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
    monkeypatch.setattr(unix, "_LINGER_S", LONG_S)


class Attempt(threading.Thread):
    """One rank, as a thread, on its way to the meeting."""

    def __init__(
        self, job: str, rank: int, size: int, *, key: bytes = KEY, timeout_s: float = LONG_S, generation: int = 1
    ) -> None:
        super().__init__()
        self.world = World(rank, size, rank, size, 0, 1, f"host{rank}", "horovodrun", job, key)
        self.meeting: Meeting | None = None
        self.error: HorovodInternalError | None = None
        self.arena = os.memfd_create(f"arena{rank}")
        self.control = os.memfd_create("control") if rank == 0 else -1
        self._how = (generation, self.arena, 4096 + rank, self.control, timeout_s)
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
            connection.connect(address_of(job, 1))
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


def test_two_jobs_and_two_generations_at_once_do_not_mix(job: str) -> None:
    teams = [
        [Attempt(name, rank, 2, generation=generation) for rank in (1, 0)]
        for name in (job, f"{job}-other")
        for generation in (1, 2)
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
        address = address_of(job, 1)
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        assert ctypes.CDLL(None).syscall(number, 65534, 65534, 65534) == 0
        with closing(stranger):
            while stranger.connect_ex(address):
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


def test_a_rank_with_another_key_is_told_that_it_may_be_the_key(job: str) -> None:
    host = Attempt(job, 0, 2)
    wrong = Attempt(job, 1, 2, key=b"x" * 16)
    error = wrong.done()
    assert isinstance(error, PeerLostError)
    assert "does not know this job's key (rank 1 on host1)" in str(error)
    guest = Attempt(job, 1, 2)
    assert [guest.done(), host.done()] == [None, None]


def test_a_process_that_listens_in_place_of_rank_0_is_found_out(job: str) -> None:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as impostor:
        impostor.bind(address_of(job, 1))
        impostor.listen()
        guest = Attempt(job, 1, 2)
        connection, _ = impostor.accept()
        with closing(connection):
            connection.recv(1 << 16)
            body = msgspec.msgpack.encode([[], "", -1])
            connection.send(hmac.digest(b"wrong", b"host" + body, "sha256") + body)
            error = guest.done()
    assert isinstance(error, InitError)
    assert "does not know the job's key" in str(error)


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


def test_the_name_is_taken(job: str) -> None:
    first = Attempt(job, 0, 2)
    _dial(job).close()
    error = Attempt(job, 0, 2).done()
    assert isinstance(error, InitError)
    assert f"another process already acts as rank 0 of job '{job}' on host0" in str(error)
    assert "HOROVOD_JOB_ID" in str(error)
    guest = Attempt(job, 1, 2)
    assert [guest.done(), first.done()] == [None, None]


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


@pytest.mark.usefixtures("patient")
def test_a_rank_that_dies_inside_init_ends_it_for_all(job: str) -> None:
    host = Attempt(job, 0, 3)
    with closing(_dial(job)) as victim:
        _send(victim, _greeting(rank=2, size=3))
    guest = Attempt(job, 1, 3)
    for error in (host.done(), guest.done()):
        assert isinstance(error, PeerLostError)
        assert str(error) == f"rank 2 (pid {os.getpid()}) died inside init()"
        assert error.rank == 2


def test_a_rank_that_is_gone_before_it_is_heard(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pidfd_open = os.pidfd_open

    def no_such_process(pid: int) -> int:
        monkeypatch.setattr(os, "pidfd_open", pidfd_open)
        raise ProcessLookupError(errno.ESRCH, "no such process")

    monkeypatch.setattr(os, "pidfd_open", no_such_process)
    # Nobody waits for it once the others are there.
    monkeypatch.setattr(unix, "_LINGER_S", 10 * LONG_S)
    host = Attempt(job, 0, 3, timeout_s=10 * LONG_S)
    with closing(_dial(job)) as victim:
        _send(victim, _greeting(size=3))
        assert victim.recv(100) == b""
    guest = Attempt(job, 2, 3)
    for error in (host.done(), guest.done()):
        assert isinstance(error, PeerLostError)
        assert "rank 1" in str(error)


def test_rank_0_dies_inside_init(job: str) -> None:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as host:
        host.bind(address_of(job, 1))
        host.listen()
        guest = Attempt(job, 1, 2)
        host.accept()[0].close()
        error = guest.done()
    assert isinstance(error, PeerLostError)
    assert "rank 0 ended inside init()" in str(error)
    assert error.rank == 0


def test_rank_0_dies_between_its_answer_and_the_arenas(job: str) -> None:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as host:
        host.bind(address_of(job, 1))
        host.listen()
        guest = Attempt(job, 1, 2)
        connection, _ = host.accept()
        with closing(connection):
            message, fds, _, _ = socket.recv_fds(connection, 1 << 16, 1)
            os.close(fds[0])
            hello = [0, 2, "h", 1, _version.__version__, 1]
            body = msgspec.msgpack.encode([[hello, hello], "", -1])
            connection.send(hmac.digest(KEY, b"host" + message[32:48] + body, "sha256") + body)
            _send(connection, b"fds", 2)
        error = guest.done()
    assert isinstance(error, PeerLostError)
    assert error.rank == 0


def test_rank_0_is_stopped(job: str) -> None:
    """It listens, but does not answer; its rank mates give up by themselves, a little later than it would."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as host:
        host.bind(address_of(job, 1))
        host.listen()
        error = Attempt(job, 1, 2, timeout_s=SHORT_S).done()
    assert isinstance(error, InitError)
    assert str(error) == "rank 0 did not answer within 0.3 s; is it stopped?"
