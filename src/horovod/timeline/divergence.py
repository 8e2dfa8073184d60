"""Finds where the ranks of a job diverge, from the dumps of their flight recorders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from horovod.timeline.dumps import Dump, Operation

__all__ = ["Open", "UnderWay", "open_operations", "under_way"]

Dumps = Mapping[int, Dump]


class Open(NamedTuple):
    """An operation that some ranks had submitted and no rank had begun.

    Attributes:
        operation: record of the rank that submitted it first.
        submitted: the ranks that had submitted it.
        missing: the members that had not submitted it.
        unknown: the members whose state is not known.
        confused: each rank's operation at its place, if these differ; unnamed operations match in the order of calls.
        age_s: seconds since its first submission.
    """

    operation: Operation
    submitted: Sequence[int]
    missing: Sequence[int]
    unknown: Sequence[int]
    confused: Mapping[int, Operation]
    age_s: float


class UnderWay(NamedTuple):
    """An operation that some ranks had begun and not ended.

    Attributes:
        operation: record of one of these ranks.
        inside: the ranks that were in the middle of it.
        behind: the members that had submitted it, but not begun it.
    """

    operation: Operation
    inside: Sequence[int]
    behind: Sequence[int]


def under_way(dumps: Dumps) -> list[UnderWay]:
    """Return the operations in execution, in the order of the log."""
    found = {}
    for dump in dumps.values():
        for op in dump.operations:
            if op.is_in_flight and op.started_ns and op.sequence not in found:
                inside = [rank for rank, other in dumps.items() if _is_inside(other, op.sequence)]
                behind = [rank for rank in op.members if rank in dumps and dumps[rank].position < op.sequence]
                found[op.sequence] = UnderWay(op, inside, behind)
    return [found[sequence] for sequence in sorted(found)]


def _is_inside(dump: Dump, sequence: int) -> bool:
    return any(op.sequence == sequence and op.is_in_flight for op in dump.operations)


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
        if not op.name:
            place = unnamed.get(op.process_set, 0)
            unnamed[op.process_set] = place + 1
        # The same name may come again later; compare the first operation.
        found.setdefault((op.process_set, op.name, place), op)
    return found


def _compare(dumps: Dumps, position: int, key: tuple[int, str, int], op: Operation) -> Open:
    members = op.members or sorted(dumps)
    theirs = {rank: _open_here(dumps[rank], position).get(key) for rank in members if rank in dumps}
    submitted = [rank for rank, other in theirs.items() if other is not None]
    missing = [rank for rank, other in theirs.items() if other is None]
    unknown = [rank for rank in members if rank not in dumps]
    for pending in (pending for dump in dumps.values() for pending in dump.pending):
        # The coordinator knows the state of ranks without a dump, too.
        if (pending.process_set, pending.name) == key[:2] and pending.name:
            submitted += [rank for rank in unknown if rank in pending.submitted]
            missing += [rank for rank in unknown if rank in pending.missing]
            unknown = [rank for rank in unknown if rank not in (*pending.submitted, *pending.missing)]
    here = {rank: other for rank, other in theirs.items() if other is not None}
    differ = len({(other.kind, other.dtype, tuple(map(tuple, other.shapes))) for other in here.values()}) > 1
    age_s = (max(dump.clock_ns for dump in dumps.values()) - op.submitted_ns) / 1e9
    return Open(op, sorted(submitted), sorted(missing), unknown, here if differ and not op.name else {}, age_s)
