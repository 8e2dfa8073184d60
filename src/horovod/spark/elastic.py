"""``horovod.spark.run_elastic``: ranks in the tasks of a Spark application that outlive the loss of some of them.

Tasks register and serve as agents, as for ``run``. When one is lost, the others keep their processes and their state;
Spark starts the task again, and its rank joins them.
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
    """Call ``fn(*args, **kwargs)`` on ranks in tasks of the Spark application, and go on when some of them are lost.

    Ranks that are left keep their processes. A rank that has failed starts again in its task; for a task that is lost,
    with its executor perhaps, Spark starts another one, as often as ``spark.task.maxFailures`` says.

    Args:
        fn: what to call; it calls ``hvd.init()`` itself, and trains in a function with ``@hvd.elastic.run``.
        args: its arguments.
        kwargs: its named arguments.
        num_proc: number of ranks to start with; Spark's default parallelism when omitted.
        min_num_proc: fewest ranks to go on with; ``num_proc`` when omitted, which waits for the task that is lost.
        max_num_proc: most ranks, which join when executors come; ``num_proc`` when omitted.
        start_timeout: seconds to wait for Spark to start ``num_proc`` tasks; HOROVOD_SPARK_START_TIMEOUT, or 600.
        elastic_timeout: seconds that the others wait for missing ranks; HOROVOD_ELASTIC_TIMEOUT, or 600.
        reset_limit: end the job instead of starting another generation after so many.
        env: more variables for the ranks; they have those of the executors.
        stdout: text stream for the output of the ranks; ``sys.stdout`` when omitted.
        stderr: text stream for their errors; ``sys.stderr`` when omitted.
        verbose: more than 0 says what is started.
        nics: network interfaces that all hosts have, names or ``"a,b"``; ranks and driver talk over them.
        prefix_output_with_timestamp: whether each line of output begins with date and time.
        min_np: deprecated, as ``min_num_proc``.
        max_np: deprecated, as ``max_num_proc``.

    Returns:
        The return value of ``fn`` on each rank of the last generation, in rank order.

    Raises:
        RuntimeError: there is no active SparkContext, as with Spark Connect.
        ValueError: arguments that contradict each other, or a function that cannot be sent.
        LaunchError: too few ranks were left; the message has the causes. Or Spark has too few slots, or did not start
            the tasks in time.
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
    """The places of an elastic job: each task is one, whose host is that of the task; see ``host_pool.Pool``.

    Args:
        tasks: registers the tasks that Spark starts again.
        options: what the user wants.
        first: tasks that have registered before.
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
        """Number of tasks that are there."""
        return len(self._slots)

    @property
    def usable(self) -> dict[str, int]:
        """Number of slots of each host, with those whose task is to come back."""
        found: dict[str, int] = {}
        for name, number in self._slots:
            found[name] = max(found.get(name, 0), number + 1)
        return found

    def offer(self, hosts: Mapping[str, HostOffer]) -> None:
        """The hosts are those of the tasks."""

    def lose(self, name: str, number: int | None) -> None:
        """A task does not answer any more."""
        assert number is not None
        del self._slots[name, number]

    def tend(self, poll: select.poll) -> list[ReadyHost]:
        """Give each task that has registered the first free slot of its host."""
        assert self.plan is not None
        ready, early = [], []
        for task in (*self._arrived, *self._tasks.listener.arrivals()):
            place = task.registration
            if old := [other for other in self._slots.values() if other.registration.partition == place.partition]:
                old[0].kill()  # Spark knew before us that it is lost
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
        """When ``tend`` is due."""
        return [time.monotonic() + _LOOK_S]

    def close(self) -> None:
        """Let go of tasks that have no slot."""
        for task in self._arrived:
            task.close()


def _carry_out(
    options: JobOptions, elastic: ElasticOptions, pool: TaskPool, call: bytes, timeout_s: float | None
) -> list[Any]:
    """Run the job to its end, and return what the ranks of the last generation have returned."""
    settings = config.load(elastic_timeout_s=timeout_s)
    # Tasks may come back on other hosts, as long as Spark tries.
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
