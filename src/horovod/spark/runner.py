"""``horovod.spark.run``: run a function on ranks in the tasks of a Spark application."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from horovod.config import JOB_ID, SECRET_KEY
from horovod.launch.call import pack, results_of
from horovod.launch.job import Job
from horovod.launch.remote import RemoteJob
from horovod.launch.supervise import FixedJob
from horovod.launch.workers import WorkerJob, in_rank_order
from horovod.spark.options import JobOptions
from horovod.spark.tasks import MachineNames, RankTasks

__all__ = ["run"]


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ``num_proc`` ranks that train together, each in a task of the Spark application.

    Each rank is a child process of its task, so ``fn`` runs in a main thread; its output appears at the driver.

    Args:
        fn: the function, also a lambda or closure; it must call ``hvd.init()``.
        args: its arguments.
        kwargs: its keyword arguments.
        num_proc: number of ranks; Spark's default number of tasks when omitted.
        start_timeout: seconds to wait for Spark to start all tasks; HOROVOD_SPARK_START_TIMEOUT, or 600.
        use_mpi: not supported: the ranks need no MPI.
        use_gloo: accepted and ignored: ranks of one host use shared memory.
        extra_mpi_args: accepted and ignored.
        env: environment variables for the ranks, in addition to those of the executors.
        stdout: text stream for the output of the ranks; ``sys.stdout`` when omitted.
        stderr: text stream for the standard error of the ranks; ``sys.stderr`` when omitted.
        verbose: more than 0 prints the started processes.
        nics: network interfaces present on all hosts, names or ``"a,b"``; ranks and driver communicate over them.
        prefix_output_with_timestamp: whether each line of output begins with date and time.
        executable: Python interpreter of the ranks; that of Spark's tasks when omitted.

    Returns:
        The return value of ``fn`` on each rank, in rank order.

    Raises:
        RuntimeError: there is no active SparkContext, as with Spark Connect.
        ValueError: an argument is not supported, or the function cannot be pickled.
        LaunchError: a rank failed (the message has its traceback, and ``__cause__`` its exception if picklable), a
            task was lost, Spark has too few slots, or it did not start all tasks in time.
        KeyboardInterrupt: Ctrl-C; all ranks were ended before.

    Blocks until all ranks have ended.
    """
    if use_mpi:
        raise ValueError("use_mpi: the ranks of horovod.spark.run need no MPI; leave it out")
    call = pack(fn, args, kwargs)
    name, timestamps = "horovod.spark.run", prefix_output_with_timestamp
    options = JobOptions(name, env, stdout, stderr, verbose, nics, timestamps, executable)
    tasks = RankTasks(options, num_proc, None, start_timeout, runs_again=False)
    is_well = False
    try:
        results = _carry_out(options, tasks, call)
        is_well = True
    finally:
        tasks.close(is_well)
    return results


def _carry_out(options: JobOptions, tasks: RankTasks, call: bytes) -> list[Any]:
    """Run the ranks to their end, and return their results."""
    connections = in_rank_order(tasks.wait(), lambda task: task.registration.machine)
    machines = MachineNames()
    names = [machines.name(task.registration) for task in connections]
    workers = WorkerJob(names, interfaces=options.interfaces)
    try:
        own = workers.variables
        common = {name: own[0][name] for name in (JOB_ID, SECRET_KEY)}
        plan = options.plan(common, connections[0].registration, own)
        options.say(f"starting {plan.size} rank{'s' * (plan.size != 1)} on {', '.join(dict.fromkeys(names))}")
        jobs: list[Job] = [
            RemoteJob(options.own_plan(part, task.registration), task, call)
            for (_, part), task in zip(plan.parts(), connections, strict=True)
        ]
        outcome = FixedJob(plan, options.sinks, jobs, workers.ended).carry_out((signal.SIGINT,), None)
    finally:
        workers.close()
    if outcome.error and (why := tasks.aborted()):
        outcome.error = f"{why}; {outcome.error}"
    return results_of(plan, outcome, jobs)
