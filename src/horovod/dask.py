"""Ranks on the workers of a Dask cluster: ``run`` calls a function on one rank per worker process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from horovod.bindings.hosted import call_hosted, leave_job, refuse_second_run
from horovod.bindings.misuse import is_integer
from horovod.config import JOB_ID
from horovod.errors import LaunchError
from horovod.launch.call import check_call
from horovod.launch.workers import WorkerJob, first_cause, in_rank_order
from horovod.phrases import few

__all__ = ["run"]

#: Interval of checks for lost workers and cancelled tasks; time for the rank that made others fail to fail itself.
_LOOK_S, _CAUSE_S = 1.0, 2.0


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    client: Any = None,
    num_proc: int | None = None,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` on ranks that train together, one in each worker process of a Dask cluster.

    The key of the job travels with Dask's own messages: use its TLS where strangers can read the network.

    Args:
        func: the function; it must call ``hvd.init()``, and runs in a thread of the worker.
        args: its arguments.
        kwargs: its named arguments.
        client: a ``distributed.Client``; the current one when omitted.
        num_proc: number of ranks; as many as there are workers when omitted.

    Returns:
        The return value of ``func`` on each rank, in rank order.

    Raises:
        LaunchError: there are too few workers, or one was lost; no rank runs a second time. Or ``client`` is closed or
            asynchronous.
        Exception: the exception of ``func`` on the first rank that failed.
        ValueError: ``func`` is not callable, or its arguments are not given as such.

    Blocks until all ranks have returned.
    """
    import dask.base
    import distributed

    check_call(func, args, kwargs)
    client = distributed.get_client() if client is None else client
    if client.status == "closed" or client.asynchronous:
        raise LaunchError(f"horovod.dask.run needs an open client that is not asynchronous. Received: {client!r}")
    workers = sorted(client.nthreads(), key=lambda address: (_host(address), address))
    size = len(workers) if num_proc is None else num_proc
    if not (is_integer(size) and 0 < size <= len(workers)):
        raise LaunchError(f"num_proc={num_proc!r}, and the Dask cluster has {len(workers)} workers: one runs each rank")
    if size > 1 and any(worker.startswith("inproc:") for worker in workers):
        raise LaunchError("ranks need processes of their own: start the cluster with processes=True")
    workers = in_rank_order(workers[:size], _host)
    job = WorkerJob([_host(worker) for worker in workers])
    futures: list[Any] = []
    try:
        with dask.base.annotate(retries=0):  # an annotation of the caller would win over an argument that is 0
            for rank, (worker, own) in enumerate(zip(workers, job.variables, strict=True)):
                call, key = (_rank, own, func, tuple(args), dict(kwargs or {})), f"horovod-{own[JOB_ID]}-{rank}"
                futures.append(client.submit(*call, workers=[worker], pure=False, key=key))
        with client.as_current():  # distributed.wait() asks the current client, which may be another one, and closed
            _wait(client, futures, workers, job)
        found: list[Any] = client.gather(futures)
        return found
    finally:
        with contextlib.suppress(Exception):  # the client may be closed, or the cluster lost
            client.cancel(futures)  # ranks that still run leave the job
        job.close()


def _host(worker: str) -> str:
    return urlsplit(worker).hostname or ""


def _wait(client: Any, futures: Sequence[Any], workers: Sequence[str], job: WorkerJob) -> None:
    """Wait until all ranks have returned; raise the error of the first rank that failed."""
    import distributed

    waiting = dict(enumerate(futures))
    who = [f"rank {rank} on worker {worker}" for rank, worker in enumerate(workers)]
    while waiting:
        try:
            distributed.wait(list(waiting.values()), timeout=_LOOK_S, return_when="FIRST_COMPLETED")
        except distributed.CancelledError:
            pass  # told below, with the ranks
        except (TimeoutError, distributed.TimeoutError):
            here = client.nthreads()
            # restart() cancels the tasks, then ends the workers.
            if lost := [n for n, future in waiting.items() if workers[n] not in here and not future.cancelled()]:
                for rank in lost:
                    job.ended(rank, who[rank], "was lost")
                gone = few([who[rank] for rank in lost])
                raise LaunchError(f"Dask lost {gone}; its log says why. The other ranks have ended, too") from None
        if cancelled := [who[rank] for rank, future in waiting.items() if future.cancelled()]:
            raise LaunchError(
                f"Dask cancelled {few(cancelled)}, as it does in client.cancel(), restart() and close(). "
                "All ranks leave the job: call horovod.dask.run again"
            )
        failed = [rank for rank, future in waiting.items() if future.status == "error"]
        for rank in failed:
            job.ended(rank, who[rank], "failed")
        if failed:
            # A rank fails, too, when another one has: wait for the error of that one.
            with contextlib.suppress(TimeoutError, distributed.TimeoutError, distributed.CancelledError):
                distributed.wait(futures, timeout=_CAUSE_S)
            raise first_cause([future.exception() for future in futures if future.status == "error"])
        waiting = {rank: future for rank, future in waiting.items() if not future.done()}


def _rank(variables: Mapping[str, str], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one rank on a worker, once."""
    import distributed

    # Dask runs the tasks of a lost worker again; by then the other ranks have ended.
    refuse_second_run(variables, "horovod.dask.run")
    worker, ended = distributed.get_worker(), threading.Event()
    tasks, own = worker.state.tasks, worker.get_current_task()
    # Ranks of an ended call may still be leaving, in other threads of this worker.
    while not _is_cancelled(tasks, own) and any(
        _is_cancelled(tasks, key) for key in list(tasks) if str(key).startswith("horovod-")
    ):
        ended.wait(_LOOK_S)
    watch = threading.Thread(target=_leave_when_cancelled, args=(tasks, own, variables[JOB_ID], ended))
    watch.start()
    try:
        return call_hosted(variables, func, args, kwargs)
    finally:
        ended.set()
        watch.join()


def _leave_when_cancelled(tasks: Mapping[Any, Any], key: Any, job_id: str, ended: threading.Event) -> None:
    """Leave the job when Dask cancels the task, also since its client is lost: Dask cannot end a task that runs."""
    while not ended.wait(_LOOK_S):
        if _is_cancelled(tasks, key):
            leave_job(job_id)
            return


def _is_cancelled(tasks: Mapping[Any, Any], key: Any) -> bool:
    return (task := tasks.get(key)) is None or task.state == "cancelled"
