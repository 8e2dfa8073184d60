"""Reads the flight recorders of all ranks, and explains where they diverge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from horovod.core.requests import Request
from horovod.errors import DeadlockError, StallError
from horovod.phrases import list_ranks
from horovod.timeline.dumps import SCRIPT_ENDED, Dump, Operation, read_folder

__all__ = ["diagnose", "examine"]

_INDENT = "    "
_MOST = 8

Dumps = Mapping[int, Dump]


class Open(NamedTuple):
    """An operation that some ranks had submitted and no rank had begun."""

    operation: Operation  # record of the rank that submitted it first
    submitted: Sequence[int]  # the ranks that had submitted it
    missing: Sequence[int]  # the members that had not submitted it
    unknown: Sequence[int]  # the members whose state is not known
    # each rank's operation at its place, if these differ; unnamed operations match in the order of calls
    confused: Mapping[int, Operation]
    age_s: float  # seconds since its first submission


def examine(folder: Path) -> tuple[list[str], bool]:
    """Read a folder and explain its dumps: return the report in lines, and whether there was any dump."""
    dumps, notes = read_folder(folder)
    if not dumps:
        return [
            f"{folder}: no dump of a flight recorder (rank-*.json) is there. Ranks that fail or stall write them to "
            "the folder that HOROVOD_FLIGHT_RECORDER_DIR names, and all running ones after kill -USR1 of horovodrun",
            *notes,
        ], False
    lines, numbers = list[str](), sorted({dump.generation for dump in dumps})
    for number in numbers:
        if len(numbers) > 1:
            lines += [f"Generation {number} of the job's members:", ""]
        lines += [*diagnose([dump for dump in dumps if dump.generation == number]), *([""] * (number < numbers[-1]))]
    return [*lines, *(f"({note})" for note in notes)], True


def diagnose(dumps: Sequence[Dump]) -> list[str]:
    """Explain the dumps of one job, of one generation and at most one of each rank, in lines."""
    by_rank = {dump.rank: dump for dump in dumps}
    absent = _absent(dumps)
    findings = [*absent, *_under_way(by_rank), *_open(by_rank)]
    findings = [*_failures(dumps, is_explained=bool(findings) and not absent), *findings]
    if not findings:
        findings = ["Nothing is wrong here: no rank had failed, and nothing waited for a rank."]
    return [*_head(dumps), "", *_table(dumps), "", *findings]


def _head(dumps: Sequence[Dump]) -> list[str]:
    first = dumps[0]
    hosts = ", ".join(sorted({dump.host for dump in dumps}))
    spread_s = max(dump.time_s for dump in dumps) - min(dump.time_s for dump in dumps)
    who, size = list_ranks(dump.rank for dump in dumps), first.size
    reasons: dict[str, list[int]] = {}
    for dump in dumps:
        reasons.setdefault(dump.reason, []).append(dump.rank)
    return [
        f"Job of {size} rank{'s' * (size != 1)} on {hosts}; dumps of {who}, written within {spread_s:.1f} s.",
        *(f"{list_ranks(ranks).capitalize()}: {reason}" for reason, ranks in reasons.items()),
    ]


def _table(dumps: Sequence[Dump]) -> list[str]:
    rows = [("rank", "pid", "log entry", "in flight", "last finished", "main thread")]
    for dump in dumps:
        finished = [op for op in dump.operations if not op.is_in_flight and op.sequence and not op.error]
        latest = max(finished, key=lambda op: op.sequence, default=None)
        last = _call(latest.request) if latest else "-"
        flying = sum(op.is_in_flight for op in dump.operations)
        rows.append((str(dump.rank), str(dump.pid), str(dump.position), str(flying), last, _doing(dump)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _failures(dumps: Sequence[Dump], is_explained: bool) -> list[str]:
    """Name the rank that failed first, and why; for a stall with another finding, only the setting that ended it."""
    failed = sorted((dump for dump in dumps if dump.failure), key=lambda dump: dump.time_s)
    if not failed:
        return []
    first, *rest = failed
    is_stall = first.reason == StallError.__name__
    is_given_up = is_stall or first.reason == DeadlockError.__name__
    verb, text = "gave up" if is_given_up else "failed", first.failure.splitlines()
    if is_stall and is_explained:
        text = text[-1:]
    lines = [f"* Rank {first.rank} {verb} first:", *(_INDENT + line for line in text)]
    if rest:
        lines.append(f"{_INDENT}({list_ranks(dump.rank for dump in rest)} {verb} afterwards.)")
    return lines


def _absent(dumps: Sequence[Dump]) -> list[str]:
    absent = sorted(set(range(dumps[0].size)) - {dump.rank for dump in dumps})
    if not absent:
        return []
    return [
        f"* There is no dump of {list_ranks(absent)}: it was killed or stopped, ended by itself, or could not run "
        "Python (an extension that keeps the GIL). Look there first."
    ]


def _under_way(by_rank: dict[int, Dump]) -> list[str]:
    """Name the operations that some ranks had begun and not ended, in the order of the log, and the ranks behind."""
    found: dict[int, dict[int, Operation]] = {}
    for rank, dump in by_rank.items():
        for op in dump.operations:
            if op.is_in_flight:
                found.setdefault(op.sequence, {})[rank] = op
    lines = []
    for sequence, inside in sorted(found.items()):
        if not (begun := [op for op in inside.values() if op.started_ns]):
            continue
        op = begun[0]
        lines.append(f"* {_what(op.request)} was under way (log entry {sequence}) on {list_ranks(inside)}.")
        for rank in op.members:
            if rank in by_rank and (late := sequence - by_rank[rank].position) > 0:
                lines.append(
                    f"{_INDENT}Rank {rank} had not come to it, it was {late} log entries behind; its main thread:"
                )
                lines += _stack(by_rank[rank])
    return lines


def _open(by_rank: dict[int, Dump]) -> list[str]:
    items = open_operations(by_rank)
    lines: list[str] = []
    told: set[int] = set()
    for item in items[:_MOST]:
        lines += _one(item)
        for rank in item.missing:
            if rank in by_rank and rank not in told:
                told.add(rank)
                doing = _doing(by_rank[rank]).partition(": ")[0]
                lines += [f"{_INDENT}Rank {rank} was {doing}; its main thread:", *_stack(by_rank[rank])]
    if len(items) > _MOST:
        lines.append(f"* ... and {len(items) - _MOST} more.")
    return lines


def _one(item: Open) -> list[str]:
    op = item.operation
    key = op.request.process_set
    of_set = f" of process set {key} (ranks {list(op.members)})" if key else ""
    lines = [f"* {_what(op.request)}{of_set} waited for {item.age_s:.1f} s: submitted by {list_ranks(item.submitted)}"]
    if item.missing:
        lines[0] += f", not by {list_ranks(item.missing)}"
    if item.unknown:
        lines[0] += f"; not known of {list_ranks(item.unknown)}"
    lines[0] += "."
    if item.confused:
        lines.append(f"{_INDENT}Operations without a name match in the order of the calls, and the orders differ:")
        lines += [
            f"{_INDENT}  rank {rank}: {_what(op.request)} of {[list(tensor.shape) for tensor in op.request.tensors]}"
            for rank, op in sorted(item.confused.items())
        ]
        lines.append(f"{_INDENT}Give them names, or call them in one order on all ranks.")
    return lines


def _what(request: Request) -> str:
    return f"{_call(request)} ({request.site})"


def _call(request: Request) -> str:
    name = repr(request.name.split(".", 1)[-1]) if request.name else "(unnamed)"
    return f"{request.kind.name.lower()} {name}"


def _doing(dump: Dump) -> str:
    wait = dump.wait
    if dump.reason == SCRIPT_ENDED:
        return "at the end of its script"
    if wait is None:
        place = next((line for line in reversed(dump.stack) if line.startswith("File ")), "not known")
        return f"in other code: {place}"
    verb = "in the middle of" if wait.executing else "waiting in"
    return f"{verb} {_what(wait.request)}"


def _stack(dump: Dump) -> list[str]:
    return [f"{_INDENT}  {line}" for line in dump.stack]


def open_operations(dumps: Dumps) -> list[Open]:
    """Return the operations that waited for some rank, the oldest first."""
    found: dict[tuple[int, str, int], Open] = {}
    for dump in dumps.values():
        for key, op in _open_here(dump, dump.position).items():
            if key not in found or op.submitted_ns < found[key].operation.submitted_ns:
                found[key] = _compare(dumps, dump.position, key, op)
    waiting = [item for item in found.values() if item.missing or item.unknown or item.confused]
    return sorted(waiting, key=lambda item: item.operation.submitted_ns)


def _open_here(dump: Dump, position: int) -> dict[tuple[int, str, int], Operation]:
    """Return the operations that a rank had submitted and not begun when the log was at ``position``.

    The key is process set, name, and position among unnamed operations.
    """
    found: dict[tuple[int, str, int], Operation] = {}
    unnamed: dict[int, int] = {}
    for op in dump.operations:
        if op.error or 0 < op.sequence <= position or (op.sequence == 0 and not op.is_in_flight):
            continue
        place = 0
        request = op.request
        if not request.name:
            place = unnamed.get(request.process_set, 0)
            unnamed[request.process_set] = place + 1
        # The same name may come again later; compare the first operation.
        found.setdefault((request.process_set, request.name, place), op)
    return found


def _compare(dumps: Dumps, position: int, key: tuple[int, str, int], op: Operation) -> Open:
    members = op.members or sorted(dumps)
    theirs = {rank: _open_here(dumps[rank], position).get(key) for rank in members if rank in dumps}
    submitted = [rank for rank, other in theirs.items() if other is not None]
    missing = [rank for rank, other in theirs.items() if other is None]
    unknown = [rank for rank in members if rank not in dumps]
    for pending in (pending for dump in dumps.values() for pending in dump.pending):
        # The coordinator knows the state of ranks without a dump, too.
        if key[1] and (pending.request.process_set, pending.request.name) == key[:2]:
            submitted += [rank for rank in unknown if rank in pending.submitted]
            missing += [rank for rank in unknown if rank in pending.missing]
            unknown = [rank for rank in unknown if rank not in (*pending.submitted, *pending.missing)]
    here = {rank: other for rank, other in theirs.items() if other is not None}
    differ = len({(other.request.kind, other.request.tensors) for other in here.values()}) > 1
    age_s = (max(dump.clock_ns for dump in dumps.values()) - op.submitted_ns) / 1e9
    return Open(op, sorted(submitted), sorted(missing), unknown, here if differ and not op.request.name else {}, age_s)
