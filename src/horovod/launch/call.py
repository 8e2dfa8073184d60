"""A function call on all ranks, in the launcher: packs it, reads what the ranks returned, or says why one failed."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from horovod.errors import LaunchError
from horovod.launch import task
from horovod.launch.outcome import Outcome
from horovod.launch.output import FileSink, OutputSink, TextSink
from horovod.launch.plan import LaunchPlan
from horovod.launch.report import report

__all__ = ["failed_call", "pack", "sink_of", "unpack_results"]


def pack(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Write down a call with the caller's module path; see ``task.pack_call``.

    Args:
        func: what to call.
        args: its arguments.
        kwargs: its named arguments.

    Raises:
        ValueError: it is not callable, or cannot be pickled.
    """
    if not callable(func):
        raise ValueError(f"func must be callable; received {type(func).__name__}")
    paths = [os.path.abspath(path) for path in sys.path]  # noqa: PTH100 - "" is the current folder
    try:
        return task.pack_call(func, args, kwargs, paths)
    except Exception as error:  # whatever the objects' own code raises
        raise ValueError(f"cannot send {func!r} and its arguments to other processes: {error}") from error


def unpack_results(packed: Sequence[bytes]) -> list[Any]:
    """Read what the ranks have returned.

    Args:
        packed: by rank.

    Raises:
        LaunchError: a rank has returned nothing, or what cannot be read here.
    """
    values = []
    for rank, data in enumerate(packed):
        try:
            result = task.unpack_result(data)
        except Exception as error:  # whatever the objects' own code raises
            raise LaunchError(f"cannot read what rank {rank} returned: {error}") from error
        if not isinstance(result, task.Result):
            raise LaunchError(f"rank {rank} ended without a result: did the function end the process?")
        values.append(result.value)
    return values


def failed_call(plan: LaunchPlan, outcome: Outcome, packed: bytes, oom: int = 0) -> LaunchError:
    """Return the error of a call that failed: Horovod's first sentence, then which rank, why, and where.

    Args:
        plan: what was started.
        outcome: how it went.
        packed: what the first rank that failed has left.
        oom: processes that the kernel killed for want of memory on this host meanwhile.
    """
    try:
        failure = task.unpack_result(packed)
    except Exception:
        failure = None
    if isinstance(failure, task.Failure):
        outcome.tails.clear()  # the traceback says it better
    lines = report(plan, outcome, oom)
    if isinstance(failure, task.Failure):
        where = next(i for i, line in enumerate(lines) if line.startswith("rank "))
        whole = f": {failure.summary}"
        lines[where] += whole.partition("\n")[0] if failure.traceback else whole
        lines += ["", failure.traceback.rstrip()] if failure.traceback else []
    error = LaunchError(
        "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
        "terminated. The first process to do so was:\n" + "\n".join(lines)
    )
    error.__cause__ = failure.error if isinstance(failure, task.Failure) else None
    return error


def sink_of(stream: TextIO | None, original: TextIO | None) -> OutputSink:
    """Return where text goes: the process's own output, or whatever a notebook has put in its place.

    Args:
        stream: a text stream; None for nowhere.
        original: that of the process, whose descriptor is used.
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
