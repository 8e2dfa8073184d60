"""Deadlocks between hosts are proven, whoever is in them: a leader's own threads never submit anything."""

from __future__ import annotations

import numpy as np
import pytest
from harness import run_ranks


def _crossed() -> str:
    import horovod.numpy as hvd

    names = ("first", "second") if hvd.rank() < 3 else ("second", "first")
    with pytest.raises(hvd.HorovodInternalError) as caught:
        for name in names:
            hvd.allreduce(np.ones(3), name=name)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_the_only_rank_of_a_host_is_in_the_circle() -> None:
    texts = run_ranks(4, _crossed, env={"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}, hosts=(3, 1))
    for text in texts:
        assert text.startswith("DeadlockError: Ranks 0, 1, 2, 3 wait for each other"), text
