"""Ranks of one host meet; whoever is missing, does not fit or dies is named."""

from __future__ import annotations

import errno
import hmac
import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import msgspec
import pytest
from clocks import let_time_run_out
from meetings import KEY, LONG_S, SHORT_S, Attempt, Elsewhere, answer, dial, greeting, listening, send

from horovod import _version
from horovod.errors import InitError, PeerLostError
from horovod.syscalls import open_process

# -- they meet -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_everybody_gets_everybodys_arena(job: str, size: int) -> None:
    ranks = [Attempt(job, rank, size) for rank in reversed(range(size))][::-1]
    for rank in ranks:
        rank.join(LONG_S)
    inodes = [os.fstat(rank.arena).st_ino for rank in ranks]
    for rank in ranks:
        meeting = rank.meeting
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


# -- what is wrong with the ranks ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
def test_two_processes_with_one_rank(job: str) -> None:
    host = Attempt(job, 0, 3)
    wanted = f"two processes came as rank 1: pid {os.getpid()} and pid {os.getpid()}"
    with closing(dial(job)) as first, closing(dial(job)) as second:
        for twin in (first, second):
            send(twin, greeting(rank=1, size=3))
        late = Attempt(job, 2, 3)
        assert [answer(twin)[1][0] for twin in (first, second)] == [wanted, wanted]
    for error in (host.done(), late.done()):
        assert isinstance(error, InitError)
        assert str(error) == wanted


def test_ranks_that_believe_in_different_sizes(job: str) -> None:
    host, guest = Attempt(job, 0, 2), Attempt(job, 1, 4)
    for error in (host.done(), guest.done()):
        assert isinstance(error, InitError)
        assert str(error) == "rank 1 expects 4 ranks, rank 0 expects 2"


@pytest.mark.parametrize("rank", [-1, 0, 2])
def test_a_rank_that_cannot_be(job: str, rank: int) -> None:
    host = Attempt(job, 0, 2)
    with closing(dial(job)) as guest:
        send(guest, greeting(rank=rank))
        assert f"came as rank {rank} of 2" in answer(guest)[1][0]
    assert f"(pid {os.getpid()}) came as rank {rank} of 2" in str(host.done())


def test_two_versions(job: str) -> None:
    host = Attempt(job, 0, 2)
    with closing(dial(job)) as guest:
        send(guest, greeting(version="0.0.1"))
        wanted = f"rank 1 runs khorovod 0.0.1, rank 0 {_version.__version__}; install one version everywhere"
        assert answer(guest)[1][0] == wanted
    assert str(host.done()) == wanted


def test_a_second_rank_0_is_told_so_and_does_no_harm(job: str) -> None:
    first = Attempt(job, 0, 2)
    dial(job).close()
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


def test_ranks_that_wait_log_whom_they_wait_for(
    job: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("horovod.rendezvous.waiting.REMIND_S", 0.0)
    for rank in [Attempt(job, rank, 4, timeout_s=SHORT_S) for rank in (0, 2)]:
        assert isinstance(rank.done(), InitError)
    assert "s for ranks 1, 3 to call init(); it gives up after 0.3 s (HOROVOD_START_TIMEOUT)" in caplog.text
    assert isinstance(Attempt(job, 2, 4, timeout_s=SHORT_S).done(), InitError)
    assert "s for rank 0 to call init(); it gives up after 0.3 s (HOROVOD_START_TIMEOUT)" in caplog.text


def test_a_missing_rank_0_is_named_with_the_knob(job: str) -> None:
    error = Attempt(job, 1, 2, timeout_s=SHORT_S).done()
    assert isinstance(error, InitError)
    assert f"rank 1 waited 0.3 s for rank 0 of job '{job}' on host1 to call init()" in str(error)
    assert "HOROVOD_START_TIMEOUT" in str(error)


# -- death inside init -----------------------------------------------------------------------------------------------


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
        with closing(dial(job)) as fickle:
            send(fickle, greeting(rank=2, size=3))
            assert len(fickle.recv(100)) == 32
    ranks = [Attempt(job, rank, 3) for rank in (1, 2)]
    assert [rank.done() for rank in (host, *ranks)] == [None] * 3


def test_a_rank_that_is_gone_before_it_is_heard(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def no_such_process(pid: int) -> int:
        if next(calls) == 1:  # the first is rank 0's own
            raise ProcessLookupError(errno.ESRCH, "no such process")
        return open_process(pid)

    monkeypatch.setattr("horovod.rendezvous.rank_zero.open_process", no_such_process)
    # Nobody waits for it once the others are there.
    monkeypatch.setattr("horovod.rendezvous.rank_zero._LINGER_S", 10 * LONG_S)
    host = Attempt(job, 0, 3, timeout_s=10 * LONG_S)
    with closing(dial(job)) as victim:
        send(victim, greeting(size=3))
        assert victim.recv(100) == b""
    guest = Attempt(job, 2, 3)
    for error in (host.done(), guest.done()):
        assert isinstance(error, PeerLostError)
        assert "rank 1" in str(error)


@contextmanager
def _rank_0(job: str) -> Iterator[tuple[Attempt, socket.socket, bytes]]:
    """Rank 1, and this test in place of rank 0, which has welcomed it; and what binds its answer to the greeting."""
    with listening(job) as listener:
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
        hello = [0, 2, "h", 1, _version.__version__, 1, 0]
        body = msgspec.msgpack.encode([[hello, hello], ["", -1]])
        connection.send(hmac.digest(KEY, b"host" + nonce + body, "sha256") + body)
        send(connection, b"fds", 2)
        connection.close()
        error = guest.done()
    assert isinstance(error, PeerLostError)
    assert error.rank == 0


@pytest.mark.usefixtures("one_name")
def test_an_answer_that_is_not_signed_is_none(job: str) -> None:
    with _rank_0(job) as (guest, connection, nonce):
        body = msgspec.msgpack.encode([[], ["", -1]])
        connection.send(hmac.digest(b"wrong", b"host" + nonce + body, "sha256") + body)
        error = guest.done()
    assert isinstance(error, InitError)
    assert "not signed with the job's key" in str(error)


@pytest.mark.usefixtures("one_name")
def test_rank_0_is_stopped(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens, but does not answer; its rank mates give up by themselves, a little later than it would."""
    monkeypatch.setattr("horovod.rendezvous.host_meeting._GRACE_S", SHORT_S)
    with listening(job):
        error = Attempt(job, 1, 2, timeout_s=SHORT_S).done()
    assert isinstance(error, InitError)
    assert "waited 0.3 s" in str(error)
    assert "is rank 0 stopped?" in str(error)
