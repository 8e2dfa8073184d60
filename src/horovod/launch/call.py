"""The launcher's side of a function call on all ranks: packs it, reads the results, or explains a failure."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from horovod.errors import LaunchError
from horovod.launch import task
from horovod.launch.job import Job
from horovod.launch.output import FileSink, OutputSink, TextSink
from horovod.launch.plan import LaunchPlan
from horovod.launch.report import Outcome, report

__all__ = ["check_call", "check_outcome", "elastic_results_of", "pack", "results_of", "sink_of"]


def check_call(func: object, args: object, kwargs: object) -> None:
    """Check the arguments of a function that calls ``func(*args, **kwargs)`` on all ranks.

    Raises:
        ValueError: the function is not callable, or its arguments are not given as such.
    """
    if not callable(func):
        raise ValueError(f"func must be callable; received {type(func).__name__}")
    if isinstance(args, str | bytes | Mapping) or not isinstance(args, Iterable):
        raise ValueError(
            f"args must be a list or tuple of the function's arguments; received {type(args).__name__}. "
            "The number of processes is num_proc"
        )
    if not isinstance(kwargs, Mapping | None):
        raise ValueError(f"kwargs must be a dict of the function's named arguments; received {type(kwargs).__name__}")


def pack(func: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    """Serialize a call with the caller's module path; see ``task.pack_call``.

    Raises:
        ValueError: as for ``check_call``, or the call cannot be pickled.
    """
    check_call(func, args, kwargs)
    paths = [os.path.abspath(path) for path in sys.path]  # noqa: PTH100 - "" is the current folder
    try:
        return task.pack_call(func, tuple(args), dict(kwargs or {}), paths)
    except Exception as error:  # pickling runs the objects' own code
        raise ValueError(f"cannot send {func!r} and its arguments to other processes: {error}") from error


def results_of(plan: LaunchPlan, outcome: Outcome, jobs: Sequence[Job], oom: int = 0) -> list[Any]:
    """Return what each rank of a job of fixed size has returned, in rank order. ``oom``: how many processes the kernel
    killed on this host meanwhile, for lack of memory.

    Raises:
        LaunchError: a rank failed (the message has its traceback), or its result cannot be read here.
        KeyboardInterrupt: a signal ended the job.
    """
    results = {rank: data for job in jobs for rank, data in job.results.items()}
    if outcome.interrupted:
        raise KeyboardInterrupt
    if (first := outcome.first_failure) is not None or outcome.error:
        raise _failed_call(plan, outcome, results.get(first.rank, b"") if first else b"", oom)
    return _unpacked([results.get(rank, b"") for rank in range(plan.size)])


def elastic_results_of(outcome: Outcome, packed: Sequence[bytes], say: Callable[[str], None]) -> list[Any]:
    """Return what each rank of the last generation of an elastic job has returned, in rank order.

    Raises:
        LaunchError: too few ranks were left, or a result cannot be read here; the message has the traceback of the
            process that failed last, if the function raised an exception there.
        KeyboardInterrupt: a signal ended the job.
    """
    failure = _failure(outcome.failed_call) if outcome.code else None
    if failure is not None:
        outcome.lines += ["", failure.traceback.rstrip() or failure.summary]
    check_outcome(outcome, say, failure.error if failure is not None else None)
    return _unpacked(packed)


def check_outcome(outcome: Outcome, say: Callable[[str], None], cause: BaseException | None = None) -> None:
    """Raise an error if an elastic job has failed.

    Raises:
        LaunchError: too few ranks were left.
        KeyboardInterrupt: a signal ended the job.
    """
    if outcome.interrupted:
        raise KeyboardInterrupt
    if outcome.code:
        raise LaunchError("\n".join(outcome.lines)) from cause
    for line in outcome.lines:
        say(line)


def _unpacked(packed: Sequence[bytes]) -> list[Any]:
    values = []
    for rank, data in enumerate(packed):
        try:
            result = task.unpack_result(data)
        except Exception as error:  # unpickling runs the objects' own code
            raise LaunchError(f"cannot read what rank {rank} returned: {error}") from error
        if not isinstance(result, task.Result):
            raise LaunchError(f"rank {rank} ended without a result: did the function end the process?")
        values.append(result.value)
    return values


def _failed_call(plan: LaunchPlan, outcome: Outcome, packed: bytes, oom: int) -> LaunchError:
    """Return the error of a call that failed: Horovod's first sentence, then which rank, why, and where."""
    failure = _failure(packed)
    if failure is not None:
        outcome.tails.clear()  # the traceback says more than the last lines of output
    lines = report(plan, outcome, oom)
    if failure is not None:
        where = next(i for i, line in enumerate(lines) if line.startswith("rank "))
        whole = f": {failure.summary}"
        lines[where] += whole.partition("\n")[0] if failure.traceback else whole
        lines += ["", failure.traceback.rstrip()] if failure.traceback else []
    error = LaunchError(
        "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
        "terminated. The first process to do so was:\n" + "\n".join(lines)
    )
    error.__cause__ = failure.error if failure is not None else None
    return error


def _failure(packed: bytes) -> task.Failure | None:
    """Read what a process that failed has sent about it; None when it sent nothing."""
    try:
        found = task.unpack_result(packed)
    except Exception:  # unpickling runs the objects' own code
        return None
    return found if isinstance(found, task.Failure) else None


def sink_of(stream: TextIO | None, original: TextIO | None) -> OutputSink:
    """Return the sink of a stream: the process's own output, if that is ``original``, or what a notebook has put in its
    place; None discards the text.
    """
    if stream is None:
        return TextSink(io.StringIO())
    if stream is original:
        try:
            stream.flush()
            return FileSink(stream.fileno())
        except (OSError, ValueError):
            pass
    return TextSink(stream)
