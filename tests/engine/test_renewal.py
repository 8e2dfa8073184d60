"""Elastic jobs of real processes: ranks are killed, the others renew, and their sums are right at every size."""

from __future__ import annotations

import numpy as np
from elastic_job import ElasticJob

from horovod import context
from horovod.core.membership_events import Policy


def steps_until(goal: int, size_at_end: int) -> list[tuple[int, int, float]]:
    """Sum up in every generation, until a generation of the final size has made enough steps."""
    import horovod.numpy as hvd
    from horovod.errors import HorovodInternalError

    hvd.init()
    seen, step = [], 0
    while True:
        context.renew(step)
        view, world = context.membership(), context.world()
        assert len(view.previous) == world.size
        try:
            while True:
                step = int(hvd.allreduce(np.array([step]), op=hvd.Max, name="step")[0])
                x = np.arange(1000, dtype=np.float64) * (world.rank + 1)
                total = hvd.allreduce(x, op=hvd.Sum, name="x")
                expected = np.arange(1000, dtype=np.float64) * (world.size * (world.size + 1) / 2)
                np.testing.assert_array_equal(total, expected)
                step += 1
                seen.append((view.number, world.size, float(total[1])))
                if world.size == size_at_end and step >= goal:
                    return seen
        except HorovodInternalError:
            continue


def test_survivors_go_on_with_right_sums_after_each_loss() -> None:
    policy = Policy(4, is_elastic=True, minimum=2)
    with ElasticJob(steps_until, policy, {"a": 4}, args=(50, 2)) as job:
        for generation in (1, 2):
            job.await_begin(generation)
            job.kill(job.slots()[0])  # rank 0
        values = job.values()
    assert len(values) == 2
