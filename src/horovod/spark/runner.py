"""``horovod.spark.run``: a function on ranks that run in the tasks of a Spark application."""

from __future__ import annotations

import secrets
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TextIO

from horovod.config import JOB_ID, SECRET_KEY
from horovod.launch import task as program
from horovod.launch.assemble import interface_settings
from horovod.launch.call import failed_call, pack, sink_of, unpack_results
from horovod.launch.job import Job
from horovod.launch.output import OutputSink
from horovod.launch.plan import SCOPE_VARIABLE, Display, LaunchPlan
from horovod.launch.remote import RemoteJob
from horovod.launch.supervise import supervise
from horovod.launch.workers import WorkerJob, in_rank_order
from horovod.spark.relay import TaskConnection
from horovod.spark.tasks import RankTasks

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

    Each rank is a process of its own below its task, so ``fn`` runs in a main thread, and its output appears here.

    Args:
        fn: what to call, a lambda or closure too; it calls ``hvd.init()`` itself.
        args: its arguments.
        kwargs: its named arguments.
        num_proc: number of ranks; Spark's default parallelism when omitted.
        start_timeout: seconds to wait for Spark to start all tasks; HOROVOD_SPARK_START_TIMEOUT, or 600.
        use_mpi: not supported: the ranks need no MPI.
        use_gloo: accepted; ranks of one host use shared memory.
        extra_mpi_args: accepted, without effect.
        env: more variables for the ranks; they have those of the executors.
        stdout: text stream for the output of the ranks; ``sys.stdout`` when omitted.
        stderr: text stream for their errors; ``sys.stderr`` when omitted.
        verbose: more than 0 says what is started.
        nics: network interfaces that all hosts have, names or ``"a,b"``; ranks and driver talk over them.
        prefix_output_with_timestamp: whether each line of output begins with date and time.
        executable: Python of the ranks; that of Spark's tasks when omitted.

    Returns:
        The return value of ``fn`` on each rank, in rank order.

    Raises:
        RuntimeError: there is no active SparkContext, as with Spark Connect.
        ValueError: arguments that this version cannot serve, or a function that cannot be sent.
        LaunchError: a rank failed; the message has its traceback, and ``__cause__`` its exception if that could be
            sent. A task was lost. Or Spark has too few slots, or did not start all tasks in time.
        KeyboardInterrupt: Ctrl-C; all ranks were ended before.

    Blocks until all ranks have ended.
    """
    if use_mpi:
        raise ValueError("use_mpi: the ranks of horovod.spark.run need no MPI; leave it out")
    call = pack(fn, tuple(args), dict(kwargs or {}))
    interfaces = tuple(nics.split(",")) if isinstance(nics, str) else tuple(nics or ())
    sinks = sink_of(stdout or sys.stdout, sys.__stdout__), sink_of(stderr or sys.stderr, sys.__stderr__)
    settings = {**interface_settings(interfaces), **(env or {})}
    tasks = RankTasks(num_proc, "horovod.spark.run", start_timeout, interfaces, runs_again=False)
    is_well = False
    try:
        ranks = in_rank_order(tasks.wait(), lambda connection: connection.task.machine)
        workers = WorkerJob(host_names(ranks), settings, interfaces)
        try:
            plan = _plan(ranks, workers, executable or "", prefix_output_with_timestamp)
            results = _carry_out(plan, ranks, workers, call, sinks, verbose)
        finally:
            workers.close()
        is_well = True
    finally:
        tasks.close(is_well)
    return results


def host_names(ranks: Sequence[TaskConnection]) -> list[str]:
    """Return the name of each rank's host; two machines never have the same one.

    Args:
        ranks: their tasks.
    """
    machines: dict[str, dict[str, str]] = {}
    names = []
    for connection in ranks:
        known = machines.setdefault(connection.task.nodename, {})
        number = len(known)
        name = connection.task.nodename if not number else f"{connection.task.nodename}-{number + 1}"
        names.append(known.setdefault(connection.task.machine, name))
    return names


def _plan(ranks: Sequence[TaskConnection], workers: WorkerJob, executable: str, timestamps: bool) -> LaunchPlan:
    own = workers.variables
    return LaunchPlan(
        command=(executable, "-m", program.__name__),
        hostname=ranks[0].task.nodename,
        environ={"PYTHONUNBUFFERED": "1", **{name: own[0][name] for name in (JOB_ID, SECRET_KEY)}},
        ranks=tuple(own),
        timestamps=timestamps,
        counts=(1,) * len(ranks),
        display=Display(launcher="horovod.spark.run", place="the Spark task on host"),
    )


def _carry_out(
    plan: LaunchPlan,
    ranks: Sequence[TaskConnection],
    workers: WorkerJob,
    call: bytes,
    sinks: tuple[OutputSink, OutputSink],
    verbose: int,
) -> list[Any]:
    """Run the ranks to their end, and return what they have returned."""
    if verbose > 0:
        hosts = ", ".join(dict.fromkeys(plan.host_of(rank) for rank in range(plan.size)))
        sinks[1].put(f"horovod.spark.run: starting {plan.size} ranks on {hosts}\n".encode())
    jobs: list[Job] = []
    for (_, part), connection in zip(plan.parts(), ranks, strict=True):
        python, *rest = part.command
        environ = {**part.environ, SCOPE_VARIABLE: secrets.token_hex(8)}
        own = replace(part, command=(python or connection.task.python, *rest), environ=environ)
        jobs.append(RemoteJob(own, connection, call))
    outcome = supervise(plan, sinks, signals=(signal.SIGINT,), jobs=jobs, on_end=workers.ended)
    packed = [job.results.get(rank, b"") for rank, job in enumerate(jobs)]
    if outcome.interrupted:
        raise KeyboardInterrupt
    if (first := outcome.first_failure) is not None or outcome.error:
        raise failed_call(plan, outcome, packed[first.rank] if first else b"")
    return unpack_results(packed)
