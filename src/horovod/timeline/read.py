"""Reads a timeline that this package wrote."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from horovod.timeline.events import GENERATION, RESET

__all__ = ["Op", "RankTrace", "Span", "read"]

#: Begin and end, in microseconds since the recording began.
Span = tuple[float, float]

#: Suffix of a row for operations that overlap with another one of their name.
_AGAIN = re.compile(r" \(\d+\)$")


@dataclass
class Op:
    """One operation of one rank; times in microseconds."""

    name: str  # name of the tensor, such as `allreduce.loss`
    sequence: int  # its place in the log, the same on all ranks
    kind: str = ""  # the collective, such as `ALLREDUCE`
    submitted: float = 0.0  # when the rank submitted it
    ready: float = 0.0  # when the last rank submitted it
    last: int = -1  # that rank, or -1 if unknown
    started: float = 0.0  # when its execution began here
    ended: float = 0.0  # when it was done here
    bytes: int = 0  # bytes of this rank's tensors
    site: str = ""  # the user's line
    waited: float | None = None  # when a thread began to wait for it, or None
    error: str = ""  # why it failed, or empty


@dataclass
class RankTrace:
    """The operations of one rank."""

    ops: list[Op] = field(default_factory=list)  # its operations, in the order of submission
    waits: list[Span] = field(default_factory=list)  # when its threads waited
    executions: list[Span] = field(default_factory=list)  # when its engine executed operations
    resets: list[float] = field(default_factory=list)  # when the members of the job changed; equal for all ranks


class _Event(msgspec.Struct):
    name: str
    ph: str
    pid: int
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, msgspec.Raw] = {}

    def number(self, key: str, default: int) -> int:
        """Return an argument that is a number."""
        return msgspec.json.decode(self.args[key], type=int) if key in self.args else default

    def text(self, key: str) -> str:
        """Return an argument that is a text."""
        return msgspec.json.decode(self.args[key], type=str) if key in self.args else ""


def read(path: Path) -> dict[int, RankTrace]:
    """Read a timeline, also while a job writes it.

    Returns:
        The operations of each rank, through resets: of all processes that had its number, in order of time.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a timeline of this package.
    """
    try:
        events = msgspec.json.decode(path.read_bytes(), type=list[_Event])
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is not a timeline: {error}") from None
    ranks: dict[int, RankTrace] = {}
    rows: dict[int, str] = {}
    for event in events:
        if event.pid < 1:
            continue
        ranks.setdefault(_rank(event), RankTrace())
        if event.name == "thread_name":
            rows[event.tid] = event.text("name")
    if not ranks:
        raise ValueError(f"{path} is not a timeline of khorovod: no rank has told anything in it")
    ops: dict[tuple[int, str, int], Op] = {}
    for event in events:
        if event.ph == "X" and event.pid >= 1:
            _take(event, rows.get(event.tid, ""), ranks[_rank(event)], ops)
    for (pid, _, _), op in ops.items():
        op.ready = op.ready or op.started
        ranks[(pid - 1) % GENERATION].ops.append(op)
    resets = [event.ts for event in events if event.name == RESET and not event.pid]
    for trace in ranks.values():
        trace.resets = resets
        trace.ops.sort(key=lambda op: op.submitted)
        trace.waits.sort()
        trace.executions.sort()
    return ranks


def _rank(event: _Event) -> int:
    return (event.pid - 1) % GENERATION


def _take(event: _Event, row: str, trace: RankTrace, ops: dict[tuple[int, str, int], Op]) -> None:
    begin, end = event.ts, event.ts + event.dur
    if row == "engine":
        trace.executions.append((begin, end))
        return
    row = _AGAIN.sub("", row)
    is_wait = row == "waiting"
    name = event.name if is_wait else row
    key = (event.pid, name, event.number("seq", 0))
    op = ops.get(key)
    if op is None:
        op = ops[key] = Op(name, key[2])
    if is_wait:
        trace.waits.append((begin, end))
        op.waited = begin
    elif event.name.startswith("NEGOTIATE_"):
        op.submitted, op.ready, op.last = begin, end, event.number("last", -1)
        op.kind, op.error = event.name.removeprefix("NEGOTIATE_"), event.text("error")
    elif event.name != "QUEUE":
        op.started, op.ended, op.bytes = begin, end, event.number("bytes", 0)
        op.site, op.error = event.text("site"), event.text("error")
