"""Elastic jobs of real processes: ranks are killed, the others renew, and their sums are right at every size."""

from __future__ import annotations

import os
import random
import signal
import sys

import numpy as np
import pytest
from elastic_job import ElasticJob
from harness import run_ranks

import horovod.numpy as hvd
from horovod import context
from horovod.core.membership_events import Begin, Leaving, Policy, Slot
from horovod.errors import DismissedError, HorovodInternalError, InitError, NotInitializedError

NUMBERS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")


def assert_environment_is_current() -> None:
    assert {name: os.environ[f"HOROVOD_{name.upper()}"] for name in NUMBERS} == {
        name: str(getattr(hvd, name)()) for name in NUMBERS
    }


def steps(goal: int) -> list[tuple[int, ...]]:
    """Sum up until ``goal`` generations have come and one more step is made; return generation and former rank."""
    hvd.init()
    assert_environment_is_current()
    with pytest.raises(NotInitializedError, match=r"has not joined the other ranks .*hvd\.elastic\.run"):
        hvd.allreduce(np.ones(1), name="too early")
    seen: list[tuple[int, ...]] = []
    step = 0
    while True:
        try:
            context.renew(step)
        except DismissedError:
            return seen
        assert_environment_is_current()
        view, rank, size = context.membership(), hvd.rank(), hvd.size()
        if seen and view.previous[rank] >= 0:
            assert view.previous[rank] == seen[-1][1]
        seen.append((view.number, rank, size))
        try:
            while True:
                step = int(hvd.allreduce(np.array([step]), op=hvd.Max, name="step")[0]) + 1
                values = np.arange(50_000, dtype=np.float64)
                total = hvd.allreduce(values * (rank + 1), op=hvd.Sum, name="sum")
                np.testing.assert_array_equal(total, values * (size * (size + 1) / 2))
                ways = [context.wants_change(), view.number >= goal]
                is_change, is_over = hvd.broadcast(np.array(ways), 0, name="ways")
                if is_over:
                    return seen
                if is_change:
                    break
        except HorovodInternalError:
            continue


def kill(job: ElasticJob, generation: int, rng: random.Random, count: int) -> None:
    """Kill members of the latest generation when one has begun, but not all of them."""
    job.await_begin(generation)
    with job._changed:
        latest = max(d.generation for d in job.decisions if isinstance(d, Begin))
        running = set(job._running)
    members = [slot for slot in job.slots(latest) if slot in running]
    for victim in rng.sample(members, min(count, len(members) - 1)):
        try:
            job.kill(victim)
        except (KeyError, ProcessLookupError):
            continue  # it has just ended


@pytest.mark.parametrize(
    ("hosts", "spares"), [({"a": 4}, 0), ({"a": 4}, 1), ({"a": 2, "b": 2}, 0)], ids=["one-host", "spare", "two-hosts"]
)
def test_sums_are_right_at_every_size_whoever_is_killed(hosts: dict[str, int], spares: int) -> None:
    rng = random.Random(7)
    policy = Policy(4 - spares, cool_down_s=(0, 0), spares=spares)
    with ElasticJob(steps, policy, hosts, args=(7,)) as job:
        for generation in range(1, 7):
            kill(job, generation, rng, rng.choice([1, 1, 2]))
        values = job.values()
    assert any(seen[-1][0] >= 7 for seen in values.values())
    assert all(number == sorted(number) for number in ([row[0] for row in seen] for seen in values.values()))


def test_rank_0_may_be_lost_each_time_until_one_is_left() -> None:
    with ElasticJob(steps, Policy(3), {"a": 3}, args=(3,)) as job:
        for generation in (1, 2):
            job.await_begin(generation)
            job.kill(job.slots(generation)[0])
        ((slot, seen),) = job.values().items()
    assert slot == Slot("a", 2)
    assert seen == [(1, 2, 3), (2, 1, 2), (3, 0, 1)]


def test_processes_whose_local_ranks_have_changed_may_begin_again() -> None:
    def begin_again() -> list[tuple[int, int, int]]:
        hvd.init()
        context.renew()
        try:
            hvd.barrier()
            if hvd.rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.barrier()
        except HorovodInternalError:
            context.renew(1)
        seen = [(hvd.rank(), hvd.local_rank(), hvd.size())]
        hvd.barrier()
        hvd.shutdown()
        hvd.init()
        with pytest.raises(
            NotInitializedError, match=r"since hvd\.shutdown\(\) at .*test_renewal\.py:\d+, at .*: only hvd"
        ):
            hvd.barrier()
        seen.append((-1, hvd.local_rank(), -1))
        assert_environment_is_current()
        context.renew(1)
        assert_environment_is_current()
        assert hvd.allgather_object(os.environ["HOROVOD_SLOT"]) == ["1", "2"]
        return [*seen, (hvd.rank(), hvd.local_rank(), hvd.size())]

    with ElasticJob(begin_again, Policy(3, minimum=2), {"a": 3}) as job:
        assert job.values() == {
            Slot("a", 1): [(0, 0, 2), (-1, 1, -1), (0, 0, 2)], Slot("a", 2): [(1, 1, 2), (-1, 2, -1), (1, 1, 2)],
        }  # fmt: skip


def test_a_member_that_leaves_ends_well_and_the_others_go_on() -> None:
    with ElasticJob(steps, Policy(3), {"a": 3}, args=(2,)) as job:
        job.await_begin(1)
        job.put(Leaving(Slot("a", 1)))
        values = job.values()
    assert values == {
        Slot("a", 0): [(1, 0, 3), (2, 0, 2)], Slot("a", 1): [(1, 1, 3)], Slot("a", 2): [(1, 2, 3), (2, 1, 2)],
    }  # fmt: skip


def test_a_process_that_is_stopped_while_all_meet_is_fenced() -> None:
    def stops_once() -> int:
        hvd.init()
        context.renew()
        if hvd.rank() == 1 and context.membership().number == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        context.renew()
        return hvd.size()

    with ElasticJob(stops_once, Policy(3, timeout_s=1.0, start_timeout_s=600.0), {"a": 3}) as job:
        assert job.values() == {Slot("a", 0): 2, Slot("a", 2): 2}


@pytest.mark.parametrize("sign", ["OMPI_COMM_WORLD", "PMI"])
def test_mpi_is_refused_with_the_reason(sign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "SIZE": "1"}.items():
        monkeypatch.setenv(f"{sign}_{name}", value)
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(InitError, match=r"(openmpi|mpich) has started this process: .* end or restart all ranks"):
        context.init()
    assert not context.is_initialized()


def test_a_job_that_is_not_elastic_has_one_membership() -> None:
    def looks() -> tuple[object, ...]:
        with pytest.raises(InitError, match="not started elastically"):
            context.renew()
        context.leave_job()
        return context.is_elastic(), tuple(context.membership()), context.wants_change()

    assert run_ranks(2, looks) == [(False, (1, (), (-1, -1)), False)] * 2


def test_a_process_loads_the_engine_between_hosts_before_the_others_wait_for_it() -> None:
    """All processes know that there are two hosts, or that a script may name more."""

    def load() -> bool:
        hvd.init()
        is_loaded = "horovod.transports.torch_dist" in sys.modules
        context.renew()
        hvd.barrier()
        return is_loaded

    with ElasticJob(load, Policy(2), {"a": 1, "b": 1}) as job:
        assert all(job.values().values())
    with ElasticJob(load, Policy(2), {"a": 2}) as job:
        assert not any(job.values().values())
    with ElasticJob(load, Policy(2, is_discovering=True), {"a": 2}) as job:
        assert all(job.values().values())
