"""A rank that only polls learns of the others' end, and one that has joined of who cannot go on."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
from harness import LIMIT_S, Ranks

import horovod.numpy as hvd
from horovod.errors import PeerLostError, StallError


def _polls_when_rank_0_dies() -> None:
    from horovod import context
    from horovod.engine import loop

    # Longer than the test: who relies on waking up by itself fails it.
    loop._IDLE_S = 4 * LIMIT_S
    hvd.allreduce(np.ones(3), name="before")
    if hvd.rank() == 0:
        pipe = context.engine().link.board
        deadline = time.monotonic() + LIMIT_S
        while pipe.reason(1) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    engine: Any = context.engine()
    deadline = time.monotonic() + LIMIT_S / 2
    while not engine._loop._is_asleep and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0)
    handle = hvd.allreduce_async(np.ones(3), name="polled")
    engine.link.board.give_reason(b"\nnow")  # says that it polls from now on
    while not hvd.poll(handle) and time.monotonic() < deadline:
        time.sleep(0.01)
    hvd.synchronize(handle)


def test_a_loop_over_poll_learns_of_the_death_of_rank_0() -> None:
    outcomes = Ranks(2, _polls_when_rank_0_dies).outcomes()
    assert outcomes[0].exitcode == -signal.SIGKILL
    assert isinstance(outcomes[1].error, PeerLostError), outcomes[1].text
    assert "rank 0" in str(outcomes[1].error)


def _joins_for_a_stopped_rank(victim: int) -> None:
    hvd.allreduce(np.ones(3), name="before")
    if hvd.rank() == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    hvd.join()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_join_ends_for_a_rank_that_is_stopped(victim: int) -> None:
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    ranks = Ranks(2, _joins_for_a_stopped_rank, (victim,), env=env)
    pid = ranks.pid(victim)
    ranks.processes[1 - victim].join(LIMIT_S)
    os.kill(pid, signal.SIGKILL)
    outcome = ranks.outcomes()[1 - victim]
    assert isinstance(outcome.error, StallError), outcome.text
    assert f"rank {victim} (pid {pid}" in str(outcome.error)
    assert "is stopped by a signal" in str(outcome.error)
