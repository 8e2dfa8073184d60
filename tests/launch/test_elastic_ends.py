"""Elastic jobs that end while the kernel holds a killed rank."""

from __future__ import annotations

import os
import re

import pytest

import horovod
from horovod.core import membership
from horovod.launch.local import LocalJob

HOST = os.uname().nodename


def test_a_killed_rank_that_the_kernel_holds_until_the_end_is_a_loss(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def train() -> int:
        import time

        import horovod.numpy as hvd
        from horovod import context

        hvd.init()
        context.renew()
        if hvd.rank() == 1:
            time.sleep(1000)
        context.renew(1)
        return hvd.size()

    monkeypatch.setattr(LocalJob, "kill_rank", lambda job, rank: None)
    monkeypatch.setattr(membership, "_KILL_S", 0.1)
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "1")
    assert horovod.run(train, num_proc=2, min_num_proc=1, cooldown_range=(3600, 3600)) == [1]
    said = capfd.readouterr().err
    assert re.search(rf"rank 1 \(on {HOST}:1\) was killed by \w+: it did not come .*; 1 rank continues at step 1", said)
    assert re.search(r"1 loss and 0 joins by step 1, 1 reset, [1-9]\S* of ", said), said
