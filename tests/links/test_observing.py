"""Observing a job on several hosts: statistics, timeline, stall reports, flight recorders; all as on one host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clocks import blame_only
from harness import Ranks, run_ranks

import horovod.numpy as hvd
from horovod import context
from horovod.errors import StallError
from horovod.links.hosts import relay
from horovod.observe import tracer
from horovod.timeline.doctor import examine

HOSTS = (2, 2)


def _work() -> Any:
    tracer._END_S = relay._TRACES_S = 100.0  # a busy machine may need more than the usual
    relay._END_S = 200.0
    for _ in range(20):
        hvd.allreduce(np.ones(25, np.float32), name="a")
    hvd.allgather(np.ones((1, 2)), name="g")
    hvd.barrier()
    stats = hvd.stats()
    return {kind: (usage.operations, usage.bytes) for kind, usage in stats.kinds.items()}, stats.in_flight


def test_every_rank_counts_what_it_did() -> None:
    expected = {"allreduce": (20, 2000), "allgather": (1, 16), "barrier": (1, 0)}
    assert run_ranks(4, _work, hosts=HOSTS) == [(expected, 0)] * 4


@pytest.mark.parametrize("hosts", [(2, 2), (3, 1), (1, 1, 2)], ids=lambda hosts: "+".join(map(str, hosts)))
def test_the_timeline_has_all_that_the_ranks_of_all_hosts_did_on_one_clock(
    hosts: tuple[int, ...], tmp_path: Path
) -> None:
    path = tmp_path / "timeline.json"
    run_ranks(4, _work, hosts=hosts, env={"HOROVOD_TIMELINE": str(path)})
    by_sequence: dict[int, dict[int, Any]] = {}
    for event in json.loads(path.read_text()):
        if event["ph"] == "X" and event["name"].startswith("NEGOTIATE"):
            by_sequence.setdefault(event["args"]["seq"], {})[event["pid"] - 1] = event
    assert len(by_sequence) == 22
    for negotiations in by_sequence.values():
        assert sorted(negotiations) == [0, 1, 2, 3]
        for event in negotiations.values():
            if (last := event["args"]["last"]) >= 0:
                begins = [other["ts"] for other in negotiations.values()]
                assert negotiations[last]["ts"] == max(begins), "they wait for the rank that came last"


def _stalls() -> str:
    blame_only(3, {"gradient": (0, 1, 2)})
    if hvd.rank() == 3:
        while context.engine().failure is None:
            pass
    with pytest.raises(StallError) as caught:
        hvd.allreduce(np.ones(3), name="gradient")
    return str(caught.value)


@pytest.mark.slow
def test_a_stall_is_reported_with_the_stack_of_a_rank_on_another_host_and_all_write_it_down(tmp_path: Path) -> None:
    env = {
        "HOROVOD_FLIGHT_RECORDER_DIR": str(tmp_path),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "0.3",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1",
    }
    ranks = Ranks(4, _stalls, env=env, hosts=HOSTS)
    pid = ranks.pid(3)
    outcomes = ranks.outcomes()
    for outcome in outcomes:
        assert outcome.error is None, outcome.text
        assert f"rank 3 (pid {pid} on host-b)" in outcome.value
        assert "in _stalls" in outcome.value and "while context.engine().failure is None" in outcome.value
    lines, found = examine(tmp_path)
    text = "\n".join(lines)
    assert found
    assert "Job of 4 ranks on " in text and "dumps of ranks 0, 1, 2, 3" in text
    assert "allreduce 'gradient'" in text and "submitted by ranks 0, 1, 2, not by rank 3." in text
    assert "in _stalls" in text
