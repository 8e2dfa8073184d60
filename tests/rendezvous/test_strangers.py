"""A process without the key, or of another user, gets no answer and keeps nobody from meeting."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import secrets
import socket
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from meetings import LONG_S, SHORT_S, Attempt, dial, greeting, listening, name_of, send, world_of

from horovod.errors import InitError
from horovod.rendezvous import host_meeting as guests
from horovod.rendezvous import messages
from horovod.rendezvous.keys import address_of, current_slot

STRANGERS: dict[str, tuple[bytes, int]] = {
    "one byte": (b"x", 0),
    "short": (b"y" * 40, 0),
    "garbage": (secrets.token_bytes(500), 0),
    "garbage with a descriptor": (secrets.token_bytes(500), 1),
    "a long message": (b"z" * 60_000, 0),
    "another key": (greeting(key=b"x" * 16), 1),
    "no key": (greeting(key=b""), 1),
    "a forged digest": (bytes(32) + greeting()[32:], 1),
    "a changed rank": (greeting().replace(b"elsewhere", b"elsewherf"), 1),
    "the right key without an arena": (greeting(), 0),
    "the right key with two descriptors": (greeting(), 2),
    "the right key with too many descriptors": (greeting(), 200),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_gets_no_answer_and_has_no_effect(job: str, who: str) -> None:
    message, fds = STRANGERS[who]
    host = Attempt(job, 0, 2)
    with closing(dial(job)) as stranger:
        send(stranger, message, fds)
        assert stranger.recv(100) == b""
    guest = Attempt(job, 1, 2)
    assert [guest.done(), host.done()] == [None, None]


def test_silent_strangers_hold_nothing_up(job: str) -> None:
    host = Attempt(job, 0, 2)
    strangers = [dial(job) for _ in range(20)]
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
            while stranger.connect_ex(name_of(job)):
                pass
            try:
                send(stranger, greeting())
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


IMPOSTORS: dict[str, tuple[bytes | None, str]] = {
    "silent": (None, "did not answer: is rank 0 stopped?"),
    "hangs up": (b"", "It hung up"),
    "another key": (b"w" * 32, "does not know the job's key"),
}


@pytest.mark.usefixtures("one_name")
@pytest.mark.parametrize("how", IMPOSTORS)
def test_who_listens_in_place_of_rank_0_is_found_out_and_named(job: str, how: str) -> None:
    reply, said = IMPOSTORS[how]
    with listening(job) as impostor:
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
    """A process that has seen the names of a meeting that failed may bind them before the next."""
    clock = [7.0]
    monkeypatch.setattr("horovod.rendezvous.keys.time", SimpleNamespace(time=lambda: clock[0]))
    monkeypatch.setattr("horovod.rendezvous.host_meeting._WELCOME_S", SHORT_S)
    if how == "another user":
        peers = [os.getuid() + 1]
        monkeypatch.setattr(
            "horovod.rendezvous.host_meeting.peer_of", lambda _: (1, peers.pop() if peers else os.getuid())
        )
    squatters = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    try:
        for slot, squatter in enumerate(squatters, current_slot()):
            squatter.bind(address_of(world_of(job), slot))
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
    monkeypatch.setattr("horovod.rendezvous.keys.time", SimpleNamespace(time=lambda: clock[0]))
    host = Attempt(job, 0, 3)
    first = Attempt(job, 1, 3)
    dial(job).close()
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
        "from horovod.rendezvous.keys import address_of, current_slot\n"
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
    resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + 150, limits[1]))
    try:
        with subprocess.Popen(
            [sys.executable, "-c", visit, job], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as crowd:
            assert crowd.stdin is not None
            assert crowd.stdout.readline() == b"here\n"
            guest = Attempt(job, 1, 2)
            assert [guest.done(), host.done()] == [None, None]
            crowd.stdin.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_rank_with_few_descriptors_says_so_by_itself(job: str) -> None:
    """It waits for no rank 0, which may have failed for the same reason."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + 10, limits[1]))
    try:
        error = Attempt(job, 1, 2, timeout_s=SHORT_S).done()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert isinstance(error, InitError)
    assert "may not open more than" in str(error) and "ulimit -n" in str(error)


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
        while third.connect_ex(name_of(job)):
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
