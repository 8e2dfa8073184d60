"""Operations that are repeated leave nothing behind: descriptors, threads, mappings, memory."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from elastic_job import ElasticJob
from harness import LIMIT_S, on_ranks

import horovod.numpy as hvd
from horovod import context
from horovod.core.membership_events import Policy
from horovod.errors import HostsUpdatedInterrupt

#: The C library may keep so much for itself.
SLACK_KB = 4096


class Footprint(NamedTuple):
    """Return what a process holds."""

    files: int
    threads: int
    maps: int
    anonymous_kb: int

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return cls(
            len(list(Path("/proc/self/fd").iterdir())),
            len(list(Path("/proc/self/task").iterdir())),
            len(Path("/proc/self/maps").read_text().splitlines()),
            int(status["RssAnon"].split()[0]),
        )


def _compare(before: Footprint, others: int = 0) -> None:
    """Compare with an earlier look.

    Args:
        before: the earlier look.
        others: how many descriptors threads of libraries may have just opened.
    """
    after, deadline = Footprint.now(), time.monotonic() + LIMIT_S / 4
    # A thread that has been joined may still be on its way out of the kernel; then or now.
    while after.threads > before.threads and time.monotonic() < deadline:
        after = Footprint.now()
    assert after.files <= before.files + others
    assert after.threads <= before.threads
    # The allocator cuts a mapping into several now and then; every test makes at least 100 rounds.
    assert after.maps <= before.maps + 8, "mappings grow"
    assert after.anonymous_kb <= before.anonymous_kb + SLACK_KB, "memory grows"


@pytest.mark.slow
@on_ranks(2, init=False)
def test_init_and_shutdown(count: int = 300) -> None:
    def cycle() -> None:
        hvd.init()
        hvd.allreduce(np.ones(100_000), name="large")
        hvd.allreduce_(hvd.zeros(1000), name="arena")
        hvd.allgather(np.ones(hvd.rank() + 1))
        hvd.shutdown()

    for _ in range(20):
        cycle()
    before = Footprint.now()
    for _ in range(count):
        cycle()
    _compare(before)


def _resets(count: int) -> int:
    from torch._C import _distributed_c10d as distributed

    hvd.init(process_sets=[hvd.ProcessSet([0])])
    state = hvd.elastic.NumpyState(done=0)
    before: list[Footprint] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        some = hvd.add_process_set([0, 1])
        hvd.allreduce(np.ones(100_000), name="large")
        hvd.allreduce_(hvd.zeros(1000), name="arena")
        if hvd.rank() < 2:
            hvd.allreduce_(hvd.zeros(1000), name="of some", process_set=some)
        state.done += 1
        if state.done == 20:
            before.append(Footprint.now())
        if state.done < 20 + count:
            raise HostsUpdatedInterrupt()

    train(state)
    _compare(before[0], others=3)
    assert b"entries" not in distributed._dump_fr_trace_json(True, False), "torch records operations, with their stacks"
    return context.membership().number


@pytest.mark.slow
def test_resets(count: int = 100) -> None:
    with ElasticJob(_resets, Policy(3), {"a": 2, "b": 1}, args=(count,)) as job:
        before = set(Path("/dev/shm").iterdir())
        assert list(job.values().values()) == [20 + count] * 3
    assert not {path for path in set(Path("/dev/shm").iterdir()) - before if "horovod" in path.name}


@pytest.mark.slow
@on_ranks(2)
def test_collectives(count: int = 1_300) -> None:
    def some(number: int) -> None:
        for i in range(number):
            # More names than signatures are remembered, and shapes that change.
            hvd.allreduce(np.ones(10), name=f"name.{i % 1300}")
            hvd.allgather(np.ones(i % 7))
            hvd.synchronize(hvd.allreduce_async(np.ones(40_000)))

    some(2_600)
    before = Footprint.now()
    some(count)
    _compare(before)


@on_ranks(2)
def test_lengths_that_never_repeat_leave_no_tensors() -> None:
    """Count the tensors that are kept after operations whose lengths never repeat, and after many that do."""
    import torch

    import horovod.torch as hvd

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(item, torch.Tensor) for item in gc.get_objects())

    def some(lengths: range) -> None:
        for length in lengths:
            ours = torch.ones(length)
            hvd.allreduce(ours)
            hvd.allreduce_(hvd.zeros(length), name="arena")
            hvd.allreduce(ours, op=hvd.Adasum)
            hvd.allgather(ours)
            hvd.broadcast(ours, 0)
            hvd.alltoall(ours[:, None])
            hvd.reducescatter(ours)
            hvd.grouped_allreduce([ours, torch.ones(3)])
            for handle in [hvd.allreduce_async(torch.ones(length + 300_000), name=f"{name}") for name in range(3)]:
                hvd.synchronize(handle)

    some(range(6, 13, 6))
    before = tensors()
    some(range(12, 132, 2 * hvd.size()))
    once = tensors() - before
    for _ in range(3):
        some(range(1200, 1200 + 4 * hvd.size(), 2 * hvd.size()))
    # Eleven operations of each of thirty lengths, or of twenty.
    assert once < 100
    assert tensors() - before > 100, "nothing is kept of what comes again"
