"""The timeline and the statistics of a job go on when its members change."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from elastic_job import ElasticJob

from horovod import context
from horovod.core.membership_events import Policy
from horovod.errors import HorovodInternalError
from horovod.timeline.__main__ import main
from horovod.timeline.events import GENERATION
from horovod.timeline.read import read

# An operation of rank 0 before the reset; rank 0 may write those of the others first.
_RECORDED = re.compile(rb'"name":"ALLREDUCE","ph":"X","ts":[\d.]+,"dur":[\d.]+,"pid":1,')


def _train(path: Path) -> tuple[int, int, int]:
    """Return the number of operations and of resets that the statistics know, and the number of operations."""
    import horovod.numpy as hvd

    hvd.init()
    done = left = 0
    while left < 25:
        context.renew()
        try:
            while left < 25:
                is_recorded = hvd.size() == 3 and hvd.rank() == 0 and _RECORDED.search(path.read_bytes())
                if is_recorded:
                    os.kill(os.getpid(), signal.SIGKILL)
                done += 1
                hvd.allreduce(np.ones(10), name=f"with_{hvd.size()}")
                left += hvd.size() == 2
        except HorovodInternalError:
            continue
    return hvd.stats().operations, hvd.stats().resets, done


def test_records_go_on_after_the_loss_of_rank_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    policy = Policy(3, minimum=2)
    with ElasticJob(_train, policy, {"a": 3}, args=(path,), env={"HOROVOD_TIMELINE": str(path)}) as job:
        values = job.values().values()
    assert [value[:2] for value in values] == [(done, 1) for _, _, done in values]
    events = json.loads(path.read_bytes())
    marks = [(event["ts"], event["args"]) for event in events if event["name"] == "RESET"]
    assert [args for _, args in marks] == [{"generation": 2, "size": 2}]
    spans = [event for event in events if event["ph"] == "X" and event["name"] == "ALLREDUCE"]
    after = [event for event in spans if event["pid"] > GENERATION]
    assert {event["pid"] for event in after} == {GENERATION + 1, GENERATION + 2}
    assert min(event["ts"] for event in after) >= marks[0][0] > 0
    ranks = read(path)
    for rank in (0, 1):
        names = [op.name for op in ranks[rank].ops]
        assert rank or "allreduce.with_3" in names
        assert names == sorted(names, reverse=True) and names.count("allreduce.with_2") == 25
    assert main([str(path)]) == 0
    assert "The members of the job changed 1 time;" in capsys.readouterr().out
