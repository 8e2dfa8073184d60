"""``horovod.spark.run_elastic``: elastic ranks in the tasks of a Spark application.

Tasks register and serve as agents, as for ``run``. When a task is lost, the other ranks keep their processes and
state; Spark restarts the task, and its rank joins them.
"""

from __future__ import annotations

import secrets
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TextIO

from horovod import config
from horovod.config import ELASTIC, JOB_ID, SECRET_KEY
from horovod.errors import LaunchError
from horovod.launch.call import pack, unpack_results
from horovod.launch.discovery import HostOffer
from horovod.launch.elastic import ElasticJob
from horovod.launch.elastic_options import ElasticOptions, elastic_options
from horovod.launch.host_pool import ReadyHost
from horovod.launch.plan import LaunchPlan
from horovod.launch.workers import listen_addresses
from horovod.rendezvous.service import Service
from horovod.spark.options import JobOptions, job_options
from horovod.spark.relay import TaskConnection
from horovod.spark.tasks import MachineNames, RankTasks

__all__ = ["run_elastic"]

_LOOK_S = 0.25


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

    Args:
        fn: the function; it must call ``hvd.init()``, and train in a function with ``@hvd.elastic.run``.
        args: its arguments.
        kwargs: its keyword arguments.
        num_proc: number of ranks to start with; Spark's default parallelism when omitted.
        min_num_proc: minimum number of ranks; by default ``num_proc``: then the job waits for lost tasks.
        max_num_proc: maximum number of ranks, reached when executors join; ``num_proc`` when omitted.
        start_timeout: seconds to wait for Spark to start ``num_proc`` tasks; HOROVOD_SPARK_START_TIMEOUT, or 600.
        elastic_timeout: seconds to wait for missing ranks; HOROVOD_ELASTIC_TIMEOUT, or 600.
        reset_limit: maximum number of generations; then the job ends instead of starting another one.
        env: environment variables for the ranks, in addition to those of the executors.
        stdout: text stream for the output of the ranks; ``sys.stdout`` when omitted.
        stderr: text stream for the standard error of the ranks; ``sys.stderr`` when omitted.
        verbose: more than 0 prints the started processes.
        nics: network interfaces present on all hosts, names or ``"a,b"``; ranks and driver communicate over them.
        prefix_output_with_timestamp: whether each line of output begins with date and time.
        min_np: deprecated; use ``min_num_proc``.
        max_np: deprecated; use ``max_num_proc``.

    Returns:
        The return value of ``fn`` on each rank of the last generation, in rank order.

    Raises:
        RuntimeError: there is no active SparkContext, as with Spark Connect.
        ValueError: arguments contradict each other, or the function cannot be pickled.
        LaunchError: too few ranks were left (the message lists the causes), Spark has too few slots, or it did not
            start the tasks in time.
        KeyboardInterrupt: Ctrl-C; all ranks were ended before.

    Blocks until all ranks have ended.
    """
    call = pack(fn, tuple(args), dict(kwargs or {}))
    name = "horovod.spark.run_elastic"
    options = job_options(name, env, stdout, stderr, verbose, nics, prefix_output_with_timestamp)
    limits = min_num_proc if min_np is None else min_np, max_num_proc if max_np is None else max_np
    tasks = RankTasks(options, num_proc, limits[1], start_timeout, runs_again=True)
    is_well = False
    try:
        given = {"--min-np": limits[0] or tasks.wanted, "--max-np": limits[1], "--reset-limit": reset_limit}
        elastic = elastic_options(given, tasks.wanted)
        assert elastic is not None
        pool = TaskPool(tasks, options, tasks.wait())
        results = _carry_out(options, elastic, pool, call, elastic_timeout)
        is_well = pool.count == tasks.most  # else tasks still wait for slots
    finally:
        tasks.close(is_well)
    return results


class TaskPool:
    """Slots of an elastic job: each task is one slot on its host; see ``host_pool.Pool``.

    Args:
        tasks: registers the tasks that Spark restarts.
        options: the user's options.
        first: tasks that have already registered.
    """

    def __init__(self, tasks: RankTasks, options: JobOptions, first: Sequence[TaskConnection]) -> None:
        self._tasks, self._options = tasks, options
        self._arrived = list(first)
        self._names = MachineNames()
        self._slots: dict[tuple[str, int], TaskConnection] = {}
        self.first = first[0].registration
        #: The plan of the job.
        self.plan: LaunchPlan | None = None
        self.problems: list[str] = []

    @property
    def count(self) -> int:
        """Number of registered tasks."""
        return len(self._slots)

    @property
    def usable(self) -> dict[str, int]:
        """Number of slots of each host, including slots whose task Spark will restart."""
        found: dict[str, int] = {}
        for name, number in self._slots:
            found[name] = max(found.get(name, 0), number + 1)
        return found

    def offer(self, hosts: Mapping[str, HostOffer]) -> None:
        """Do nothing: the hosts are those of the tasks."""

    def lose(self, name: str, number: int | None) -> None:
        """Handle a task that no longer answers."""
        assert number is not None
        del self._slots[name, number]

    def tend(self, poll: select.poll) -> list[ReadyHost]:
        """Assign each registered task to the first free slot of its host."""
        assert self.plan is not None
        ready, early = [], []
        for task in (*self._arrived, *self._tasks.listener.arrivals()):
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
        return ready

    def due_at(self) -> list[float]:
        """Times at which ``tend`` is due."""
        return [time.monotonic() + _LOOK_S]

    def close(self) -> None:
        """Release tasks without a slot."""
        for task in self._arrived:
            task.close()


def _carry_out(
    options: JobOptions, elastic: ElasticOptions, pool: TaskPool, call: bytes, timeout_s: float | None
) -> list[Any]:
    """Run the job to its end, and return the results of the ranks of the last generation."""
    settings = config.load(elastic_timeout_s=timeout_s)
    # Restarted tasks may run on other hosts, as long as Spark retries.
    policy = replace(elastic.policy(settings.elastic_timeout_s, settings.start_timeout_s), is_discovering=True)
    key = secrets.token_hex(32)
    service = Service(bytes.fromhex(key), listen_addresses(options.interfaces), policy=policy)
    try:
        common = {ELASTIC: "1", JOB_ID: secrets.token_hex(16), SECRET_KEY: key}
        pool.plan = options.plan(common, pool.first, ())
        options.say(f"starting {elastic.num_proc} ranks")
        job = ElasticJob(
            pool.plan, options.sinks, elastic, service, pool, {}, ("", ",".join(service.endpoints)), call=call
        )
        outcome = job.carry_out((signal.SIGINT,), None)
        results = job.results()
    finally:
        service.close()
    if outcome.interrupted:
        raise KeyboardInterrupt
    if outcome.code:
        raise LaunchError("\n".join(outcome.lines))
    for line in outcome.lines:
        options.say(line)
    return unpack_results(results)
