"""``horovod.spark.run_elastic``: elastic ranks in the tasks of a Spark application.

Tasks register and serve as agents, as for ``run``. When a task is lost, the other ranks keep their processes and
state; Spark restarts the task, and its rank joins them.
"""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TextIO

from horovod import config
from horovod.bindings.docstrings import explained_like
from horovod.errors import LaunchError
from horovod.launch.call import elastic_results_of, pack
from horovod.launch.elastic_assembly import run_on_pool
from horovod.launch.elastic_options import ElasticOptions, argument_options, seconds
from horovod.launch.host_pool import Pool, ReadyHost
from horovod.launch.hosts import HostSlots
from horovod.launch.plan import LaunchPlan
from horovod.spark.application import Application
from horovod.spark.options import JobOptions
from horovod.spark.relay import TaskConnection
from horovod.spark.runner import run
from horovod.spark.tasks import MachineNames, RankTasks, rank_count

__all__ = ["run_elastic"]

_LOOK_S = 0.25


@explained_like(
    run,
    fn="the function; it must call ``hvd.init()``, and train in a function with ``@hvd.elastic.run``.",
    num_proc="number of ranks to start with; Spark's default number of tasks when omitted.",
    min_num_proc="minimum number of ranks; by default ``num_proc``: then the job waits for lost tasks.",
    max_num_proc="maximum number of ranks, reached when executors join; ``num_proc`` when omitted.",
    elastic_timeout="seconds to wait for missing ranks; HOROVOD_ELASTIC_TIMEOUT, or 600.",
    reset_limit="maximum number of generations; then the job ends instead of starting another one.",
    min_np="deprecated; use ``min_num_proc``.",
    max_np="deprecated; use ``max_num_proc``.",
)
def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ranks in tasks of the Spark application, and continue when ranks are lost.

    Surviving ranks keep their processes. A failed rank restarts in its task. Spark replaces a lost task, for example
    after the loss of its executor, up to ``spark.task.maxFailures`` times.

    Returns:
        The return value of ``fn`` on each rank of the last generation, in rank order.

    Raises:
        RuntimeError: there is no active SparkContext, as with Spark Connect.
        ValueError: arguments contradict each other, or the function cannot be pickled.
        LaunchError: too few ranks were left (the message lists the causes, and has the traceback of the last process
            that failed), Spark has too few slots, or it did not start the tasks in time.
        KeyboardInterrupt: Ctrl-C; all ranks were ended before.
    """
    call = pack(fn, args, kwargs)
    name = "horovod.spark.run_elastic"
    options = JobOptions(name, env, stdout, stderr, verbose, nics, prefix_output_with_timestamp)
    seconds(elastic_timeout, "elastic_timeout")
    limits = min_num_proc if min_np is None else min_np, max_num_proc if max_np is None else max_np
    wanted = rank_count(Application(), num_proc)
    fewest = wanted if limits[0] is None else limits[0]
    elastic = argument_options(wanted, min_num_proc=fewest, max_num_proc=limits[1], reset_limit=reset_limit)
    assert elastic is not None
    tasks = RankTasks(options, wanted, limits[1], start_timeout, runs_again=True)
    is_well = False
    try:
        pool = TaskPool(tasks, options, tasks.wait())
        results = _carry_out(options, elastic, pool, call, elastic_timeout)
        is_well = pool.count == tasks.most  # else tasks still wait for slots
    finally:
        tasks.close(is_well)
    return results


class TaskPool(Pool):
    """Slots of an elastic job: each task is one slot on its host; see ``host_pool.Pool``."""

    plan: LaunchPlan

    def __init__(self, tasks: RankTasks, options: JobOptions, first: Sequence[TaskConnection]) -> None:
        self.tasks, self._options = tasks, options
        self._arrived = list(first)
        self._names = MachineNames()
        self._slots: dict[tuple[str, int], TaskConnection] = {}
        self.first = first[0].registration
        self.problems: list[str] = []

    @property
    def count(self) -> int:
        """Number of registered tasks."""
        return len(self._slots)

    @property
    def usable(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, number in self._slots:
            found[name] = max(found.get(name, 0), number + 1)
        return found

    def offer(self, hosts: Mapping[str, HostSlots]) -> None:
        """Do nothing: the hosts are those of the tasks."""

    def lose(self, name: str, number: int | None) -> None:
        assert number is not None
        del self._slots[name, number]

    def tend(self, poll: select.poll) -> list[ReadyHost]:
        ready, early = [], []
        for task in (*self._arrived, *self.tasks.listener.arrivals()):
            place = task.registration
            if old := [other for other in self._slots.values() if other.registration.partition == place.partition]:
                old[0].kill()  # Spark detected the loss before us
                task.wire.show_life()
                early.append(task)
                continue
            name, number = self._names.name(place), 0
            while (name, number) in self._slots:
                number += 1
            self._slots[name, number] = task
            ready.append(ReadyHost(name, task, place.cores, number, self._options.own_plan(self.plan, place)))
        self._arrived = early
        if not (ready or early or self._slots) and self.tasks.job.has_ended:
            raise LaunchError("no Spark task is left")
        return ready

    def due_at(self) -> list[float]:
        return [time.monotonic() + _LOOK_S]

    def close(self) -> None:
        for task in self._arrived:
            task.close()


def _carry_out(
    options: JobOptions, elastic: ElasticOptions, pool: TaskPool, call: bytes, timeout_s: float | None
) -> list[Any]:
    """Run the job to its end, and return the results of the ranks of the last generation."""
    settings = config.load(elastic_timeout_s=timeout_s)
    # Restarted tasks may run on other hosts, as long as Spark retries.
    policy = replace(elastic.policy(settings.elastic_timeout_s, settings.start_timeout_s), is_discovering=True)
    plan = options.plan({}, pool.first, ())
    options.say(f"starting {elastic.num_proc} ranks")
    outcome, results = run_on_pool(
        plan, options.sinks, elastic, policy, pool, options.interfaces, call, (signal.SIGINT,)
    )
    if outcome.code and (why := pool.tasks.aborted()):
        outcome.lines.insert(1, why)
    return elastic_results_of(outcome, results, options.say)
