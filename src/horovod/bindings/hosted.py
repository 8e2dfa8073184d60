"""Run one call as a rank inside a process of another system, such as a worker of Dask or Ray."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod import context
from horovod.config import JOB_ID, MEETING, RANK_VARIABLES, SECRET_KEY
from horovod.errors import HorovodInternalError, LaunchError
from horovod.rendezvous.client import JobStore
from horovod.world import check_meetings

__all__ = ["RETURNED", "call_guarded", "call_hosted", "end_of_call", "leave_job", "refuse_second_run"]

RETURNED = "its function has returned"
"""The reason for ranks that still wait for this one."""
#: Protects the environment of the present job: `leave_job` must not meet the next one.
_lock = threading.Lock()


def refuse_second_run(variables: Mapping[str, str], again: str) -> None:
    """Raise if this rank has run before: a system that reruns tasks of a lost process must not rerun a rank. ``again``
    is the function to call for a retry, such as "horovod.dask.run".

    Raises:
        LaunchError: the rank has run before.
        TimeoutError: the job service does not answer, for example because the job is over.

    Blocks until the job service has answered.
    """
    rank, endpoints = variables[RANK_VARIABLES["rank"]], variables[MEETING].split(",")
    store = JobStore(bytes.fromhex(variables[SECRET_KEY]), lambda: endpoints)
    try:
        if store.add(f"once/{rank}", 1) > 1:
            raise LaunchError(f"rank {rank} has run before, in a process that was lost: call {again} again")
    finally:
        store.close()


def leave_job(job_id: str) -> None:
    """Make the rank in this process leave a job: its init() or next collective raises an error; from any thread.

    Args:
        job_id: HOROVOD_JOB_ID of the job; a rank of another job stays in it.
    """
    with _lock:
        if os.environ.get(JOB_ID) == job_id:
            check_meetings(end_of_call)
            context.shutdown("another rank of its job has failed")


def end_of_call() -> None:
    """Raise the error of an ``init()`` that waits for ranks which will not come.

    Raises:
        HorovodInternalError: always.
    """
    raise HorovodInternalError("init() ends: another rank's function has failed, or the call was interrupted")


def call_hosted(
    variables: Mapping[str, str], func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a function as a rank, and return its result; see ``call_guarded``. Then leave the job, and restore the
    environment.

    Raises:
        LaunchError: this process is a rank of another job, or the function called ``sys.exit``.
        Exception: as ``func`` raised it.
    """
    if SECRET_KEY in os.environ:
        raise LaunchError("this process is a rank of another job already; wait for that one, or start more workers")
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        return call_guarded(func, args, kwargs)
    finally:
        context.shutdown(RETURNED)
        with _lock:
            check_meetings()
            for name, text in before.items():
                if text is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = text


def call_guarded(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function and return its result; do not let it end this process.

    Raises:
        LaunchError: the function called ``sys.exit``.
        Exception: as ``func`` raised it; this process has left its job first, so that no rank waits for it.
    """
    try:
        return func(*args, **kwargs)
    except SystemExit as end:
        context.shutdown()
        raise LaunchError(f"the function ended with sys.exit({end.code or 0!r}) instead of returning") from end
    except BaseException:
        context.shutdown()
        raise
