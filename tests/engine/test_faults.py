"""One rank comes to grief, in every way and at every stage: the others raise an error that names it."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from clocks import let_time_run_out
from harness import LIMIT_S, Outcome, Ranks
from kernel import tells_how_processes_end

import horovod.numpy as hvd
from horovod import context
from horovod.bindings import process_sets
from horovod.engine import loop
from horovod.engine.execution import Execution
from horovod.errors import HorovodInternalError, InitError, PeerLostError
from horovod.links.shm import peers
from horovod.rendezvous import rank_zero as host
from horovod.transports.shm import flags, moves
from horovod.transports.shm.control import Presence
from horovod.transports.shm.staging import Staging

VICTIM = 1


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_of_a_signal_without_a_name() -> None:
    os.kill(os.getpid(), signal.SIGRTMIN + 6)


def _segfault() -> None:
    ctypes.string_at(0)


def _os_exit() -> None:
    os._exit(3)


def _sys_exit() -> None:
    sys.exit(3)


def _raise() -> None:
    raise KeyError("a bug of the user's")


def _disk_full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "checkpoint.pt")


#: The way to end, its exit code (negative: a signal), and what the others must be told where the kernel tells them.
WAYS: dict[str, tuple[Callable[[], None], int, str]] = {
    "kill": (_kill, -signal.SIGKILL, "was killed by SIGKILL"),
    "nameless": (_die_of_a_signal_without_a_name, -signal.SIGRTMIN - 6, f"was killed by signal {signal.SIGRTMIN + 6}"),
    "segfault": (_segfault, -signal.SIGSEGV, "was killed by SIGSEGV"),
    "os_exit": (_os_exit, 3, "exited with code 3"),
    "sys_exit": (_sys_exit, 1, "has left the job"),
    "exception": (_raise, 1, "has left the job"),
    "disk_full": (_disk_full, 1, "has left the job"),
}


SUDDEN = ("kill", "nameless", "segfault", "os_exit")


def _survivors(outcomes: list[Outcome], expected: type[HorovodInternalError]) -> list[Outcome]:
    others = [outcome for outcome in outcomes if outcome.rank != VICTIM]
    for outcome in others:
        assert isinstance(outcome.error, expected), f"rank {outcome.rank}: {outcome.text or outcome.exitcode}"
    return others


def _check(outcomes: list[Outcome], way: str, pid: int) -> None:
    _, exitcode, words = WAYS[way]
    assert outcomes[VICTIM].exitcode == exitcode, "the fault did not fire"
    for outcome in _survivors(outcomes, PeerLostError):
        text = str(outcome.error)
        assert f"rank {VICTIM} (pid {pid}" in text
        assert words in text or (way in SUDDEN and not tells_how_processes_end() and "died" in text), text


def _leave_time_to_collect() -> None:
    """The code is known when the parent of the ranks has run, which is when the machine lets it."""
    peers._COLLECT_TRIES = 4000


def _between_collectives(way: str) -> None:
    _leave_time_to_collect()
    for _ in range(3):
        hvd.allreduce(np.ones(10), name="before")
    if hvd.rank() == VICTIM:
        WAYS[way][0]()
    hvd.allreduce(np.ones(10), name="after")


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_ends_while_the_others_wait_for_it(way: str) -> None:
    ranks = Ranks(3, _between_collectives, (way,))
    pid = ranks.pid(VICTIM)
    _check(ranks.outcomes(), way, pid)


def _mid_collective(way: str) -> None:
    _leave_time_to_collect()
    if hvd.rank() == VICTIM:
        original = Staging.rounds if hvd.size() == 2 else Staging.exchange

        def failing(self: Any, sequence: int, members: Any, count: int, fill: Any, *steps: Any) -> None:
            def fatal_fill(round_: int, offset: int) -> None:
                if round_ == 2:
                    WAYS[way][0]()
                fill(round_, offset)

            original(self, sequence, members, count, fatal_fill, *steps)

        setattr(Staging, original.__name__, failing)
    hvd.allreduce_(np.ones(2_000_000), name="large")


def _mid_writing(way: str) -> None:
    _leave_time_to_collect()
    if hvd.rank() == VICTIM:
        # The others know where its result lies, and write to it.
        moves.find_results = lambda *_: WAYS[way][0]()  # type: ignore[assignment, return-value]
    hvd.allgather(np.ones(2_000_000), name="large")


@pytest.mark.quick
@pytest.mark.parametrize("way", ["kill", "exception"])
def test_a_rank_ends_while_others_write_to_its_result(way: str) -> None:
    ranks = Ranks(2, _mid_writing, (way,))
    pid = ranks.pid(VICTIM)
    if way == "kill":
        _check(ranks.outcomes(), way, pid)
    else:
        assert len(_survivors(ranks.outcomes(), HorovodInternalError)) == 1


@pytest.mark.parametrize(("way", "size"), [("kill", 2), *((way, 3) for way in SUDDEN)])
def test_a_rank_dies_in_the_middle_of_a_collective(way: str, size: int) -> None:
    ranks = Ranks(size, _mid_collective, (way,))
    pid = ranks.pid(VICTIM)
    outcomes = ranks.outcomes()
    _check(outcomes, way, pid)
    for survivor in _survivors(outcomes, PeerLostError):
        assert "waited in allreduce 'large' (" in str(survivor.error)


def _seldom(where: str) -> None:
    """Nobody looks by itself whether the others live."""
    loop._LOOK_S = flags._SLICE_S = 4 * LIMIT_S
    if where == "between":
        _between_collectives("kill")
    else:
        _mid_collective("kill")


@pytest.mark.parametrize("where", ["between", "middle"])
def test_a_death_wakes_those_who_look_seldom(where: str) -> None:
    ranks = Ranks(3, _seldom, (where,))
    pid = ranks.pid(VICTIM)
    _check(ranks.outcomes(), "kill", pid)


def test_a_rank_fails_in_the_middle_of_a_collective() -> None:
    outcomes = Ranks(3, _mid_collective, ("disk_full",)).outcomes()
    assert outcomes[VICTIM].exitcode == 1
    for outcome in _survivors(outcomes, PeerLostError):
        assert f"rank {VICTIM} (pid" in str(outcome.error)
        assert "failed" in str(outcome.error)


def _before_init() -> None:
    if int(os.environ["HOROVOD_RANK"]) == VICTIM:
        _kill()
    let_time_run_out(setattr)
    process_sets.init()


def test_a_rank_ends_before_init() -> None:
    """No launcher watches here, so it is the start timeout that ends the others."""
    outcomes = Ranks(3, _before_init, init=False).outcomes()
    assert outcomes[VICTIM].exitcode == -signal.SIGKILL
    for outcome in _survivors(outcomes, InitError):
        assert f"rank {VICTIM} did not call init() within {LIMIT_S:g} s" in str(outcome.error)
        assert "HOROVOD_START_TIMEOUT" in str(outcome.error)


def _inside_init(way: str) -> None:
    host._LINGER_S = LIMIT_S  # the third may come late and shall hear of it, too
    if int(os.environ["HOROVOD_RANK"]) == VICTIM:
        send = socket.send_fds

        def send_and_end(*args: Any, **kwargs: Any) -> int:
            send(*args, **kwargs)
            WAYS[way][0]()
            return 0

        socket.send_fds = send_and_end
    process_sets.init()

    hvd.allreduce(np.ones(3), name="first")


@pytest.mark.parametrize("way", ["kill", "exception"])
def test_a_rank_ends_inside_init(way: str) -> None:
    ranks = Ranks(3, _inside_init, (way,), init=False)
    outcomes = ranks.outcomes()
    assert outcomes[VICTIM].exitcode == WAYS[way][1]
    for outcome in _survivors(outcomes, PeerLostError):
        assert f"rank {VICTIM}" in str(outcome.error)


def _in_shutdown() -> None:
    hvd.allreduce(np.ones(3), name="last")
    if hvd.rank() == VICTIM:
        Execution.leave = lambda self, reason: _kill()  # type: ignore[method-assign]


def test_a_rank_dies_in_shutdown() -> None:
    """Nobody needs it any more, so nobody minds."""
    outcomes = Ranks(3, _in_shutdown).outcomes()
    assert outcomes[VICTIM].exitcode == -signal.SIGKILL
    assert [o.exitcode for o in outcomes if o.rank != VICTIM] == [0, 0]


def _comes_late() -> None:
    hvd.allreduce(np.ones(10), name="before")
    if hvd.rank() == 0:
        context._context.ending.note(ValueError("boom"), None)
        return
    control: Any = context.engine().transport
    deadline = time.monotonic() + LIMIT_S / 2
    while control.control.state_of(0) is not Presence.LEFT and time.monotonic() < deadline:
        time.sleep(0.001)  # the caller computes
    hvd.allreduce(np.ones(10), name="after")


def test_who_comes_when_rank_0_has_left_is_told_why() -> None:
    outcome = Ranks(2, _comes_late, ()).outcomes()[1]
    assert isinstance(outcome.error, PeerLostError), outcome.text
    assert "ended with ValueError: boom" in str(outcome.error)
