"""Numbers about what a rank has done."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from harness import on_ranks, run_ranks

import horovod.numpy as hvd
from horovod.engine.stats import Stats, Usage


def test_fusion_efficiency() -> None:
    def stats(operations: int, fused: int, fusions: int) -> Stats:
        return Stats(1.0, operations, 0, 0, {}, fused, fusions, 0, 0.0)

    assert stats(0, 0, 0).fusion_efficiency == 0.0
    assert stats(10, 0, 0).fusion_efficiency == 0.0
    assert stats(10, 10, 1).fusion_efficiency == pytest.approx(0.9)
    assert stats(10, 4, 2).executions == 8


def _work(count: int) -> Any:
    for _ in range(count):
        hvd.allreduce(np.ones(25, np.float32), name="a")
    hvd.grouped_allreduce([np.ones(5), np.ones(5)], name="g")
    for i in range(count):
        hvd.allgather(np.ones((1, 2)), name=f"new.{i}")
    handle = hvd.broadcast_async(np.ones(1), 0, name="b")
    before = hvd.stats()
    hvd.synchronize(handle)
    hvd.barrier()
    return asdict(before), asdict(hvd.stats())


@pytest.mark.parametrize("capacity", ["1024", "3"])
def test_what_is_counted(capacity: str) -> None:
    for before, after in run_ranks(2, _work, 40, env={"HOROVOD_CACHE_CAPACITY": capacity}):
        assert before["kinds"]["allreduce"] == asdict(Usage(41, 40 * 100 + 80))
        assert before["kinds"]["allgather"] == asdict(Usage(40, 40 * 16))
        assert before["operations"] == 82
        assert after["operations"] == 83
        assert after["in_flight"] == 0
        assert after["bytes"] == 4080 + 640 + 8
        assert 0 < after["waits"] <= 83
        assert 0 < after["wait_s"] < after["elapsed_s"]


@on_ranks(2)
def test_fusion_is_counted() -> None:
    hvd.barrier()
    while not hvd.stats().fused:
        handles = [hvd.allreduce_async(np.ones(100_000, np.float32), name=f"x{i}") for i in range(30)]
        for handle in handles:
            hvd.synchronize(handle)
        if hvd.allreduce(np.array([bool(hvd.stats().fused)], np.int32), op=hvd.Max)[0]:
            break
    stats = hvd.stats()
    if hvd.rank() == 0:
        assert stats.fused >= 2 * stats.fusions > 0
        assert 0 < stats.fusion_efficiency < 1
