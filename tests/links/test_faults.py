"""A rank or a whole host comes to grief: every rank of every other host raises an error that names it."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from harness import Ranks

from horovod.errors import PeerLostError

HOSTS = (2, 2)


def _dies(victim: int) -> None:
    import horovod.numpy as hvd

    hvd.allreduce(np.ones(3), name="before")
    if hvd.rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(np.ones(3), name="never")


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(4), ids=["the hub", "beside the hub", "a leader", "beside a leader"])
def test_a_killed_rank_is_named_on_all_hosts(victim: int) -> None:
    ranks = Ranks(4, _dies, (victim,), hosts=HOSTS)
    pid = ranks.processes[victim].pid
    outcomes = ranks.outcomes()
    assert outcomes[victim].exitcode == -signal.SIGKILL, "the fault did not fire"
    for outcome in outcomes:
        if outcome.rank != victim:
            assert isinstance(outcome.error, PeerLostError), outcome.text
            assert outcome.error.rank == victim
            assert f"rank {victim} (pid {pid}" in str(outcome.error)


@pytest.mark.slow
def test_a_rank_that_leaves_is_told_from_one_that_dies() -> None:
    def _leaves() -> None:
        import horovod.numpy as hvd

        hvd.allreduce(np.ones(3), name="before")
        if hvd.rank() != 3:
            hvd.allreduce(np.ones(3), name="never")

    for outcome in Ranks(4, _leaves, hosts=HOSTS).outcomes()[:3]:
        assert isinstance(outcome.error, PeerLostError), outcome.text
        assert "rank 3" in str(outcome.error) and "has left the job" in str(outcome.error)
