"""The operations of one rank as events of the Chrome trace format, which chrome://tracing and Perfetto read.

A process of the trace is a rank, rank 0 being process 1. Its first two rows are the executions of its engine, and the
waits of its threads; then comes one row per tensor name, with Horovod's names for the phases of an operation:
``NEGOTIATE_ALLREDUCE`` until the last rank has submitted it, ``QUEUE`` until the engine has time for it, ``ALLREDUCE``
while it is executed. After a reset, which is marked across all rows, the ranks are new processes of the trace.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from horovod.core.requests import Kind, ReduceOp, Request

__all__ = ["BLOCK_CHARS", "CYCLE", "ENGINE_ROW", "GENERATION", "RESET", "WAITING_ROW", "Events", "Span"]

#: Rows of a rank; tensors follow.
ENGINE_ROW, WAITING_ROW = 1, 2
_FIRST_TENSOR_ROW = 100
#: Row numbers are unique in the trace, and none is the number of a rank: readers take them for threads.
_ROWS_PER_RANK = 10_000
#: Largest block of events in characters, unless one event is longer; our JSON is plain ASCII.
BLOCK_CHARS = 4000
_TEXT = 400
_SHAPES = 4
_REMEMBERED = 16_384
_MOST_ROWS = 2000
_WAITING, _MORE = "waiting", "more names"
CYCLE, RESET = "CYCLE_START", "RESET"
GENERATION = 4096
"""Difference of a rank's process numbers in the trace between one generation of the job and the next."""


class Span(NamedTuple):
    """One operation of one rank; times in nanoseconds on the clock of the host, 0 if it did not happen."""

    request: Request
    submitted: int  # when it was submitted
    waited: int  # when a thread began to wait for it
    sequence: int  # its place in the log
    started: int  # when its execution began
    ended: int  # when it was done
    together: int  # number of operations that were executed at once
    error: str | None  # why it failed, or None
    ready: int = 0  # when the last rank submitted it; 0 if unknown
    last: int = -1  # that rank, or -1


class _Shape(NamedTuple):
    """Templates (for ``%``, of JSON) that all spans of one request share."""

    request: Request
    name: str
    negotiate: str
    execute: str
    wait: str
    engine: str


def _template(process: int, name: str, args: str) -> str:
    """Return a template of an event, to fill in: begin and length in microseconds, row, and fields of ``args``."""
    quoted = json.dumps(name).replace("%", "%%")
    return f'{{"name":{quoted},"ph":"X","ts":%.3f,"dur":%.3f,"pid":{process},"tid":%d,"args":{{{args}}}}}'


class Events:
    """Turns the spans of one rank into events. Time 0 of the trace is ``origin``, in nanoseconds on the host's clock.
    ``marks`` returns whether this rank marks executions of a process set across all ranks.
    """

    def __init__(
        self, rank: int, title: str, origin: int, marks: Callable[[int], bool], generation: int = 1
    ) -> None:  # fmt: skip
        self._process = (generation - 1) * GENERATION + rank + 1
        self._first_row = self._process * _ROWS_PER_RANK
        self._origin = origin
        self._marks = marks
        self._shapes: dict[int, _Shape] = {}
        self._rows: dict[str, list[int]] = {_WAITING: [self._first_row + WAITING_ROW]}
        self._free_at: dict[int, int] = {}
        self._seen: set[int] = set()
        self._queue = _template(self._process, "QUEUE", '"seq":%d')
        self._next_row = self._first_row + _FIRST_TENSOR_ROW
        self._new: list[str] = []
        self._meta("process_name", 0, f'"name":{json.dumps(title)}')
        self._meta("process_sort_index", 0, f'"sort_index":{self._process}')
        for row, words in ((ENGINE_ROW, "engine"), (WAITING_ROW, _WAITING)):
            self._name_row(self._first_row + row, words)

    @staticmethod
    def first(epoch_us: int) -> bytes:
        """Return the first event of a file: when it began, in microseconds since 1970."""
        return (
            '{"name":"process_name","ph":"M","pid":0,"args":{"name":"khorovod",'
            f'"start_time_since_epoch_in_micros":{epoch_us}}}}}'
        ).encode()

    @staticmethod
    def reset(generation: int, size: int, at_us: float) -> bytes:
        """Return the mark of a reset: the generation of the job that begins there, and its number of ranks."""
        return (
            f'{{"name":"{RESET}","ph":"i","ts":{at_us:.3f},"pid":0,"tid":0,"s":"g",'
            f'"args":{{"generation":{generation},"size":{size}}}}}'
        ).encode()

    def take(self) -> list[bytes]:
        """Return the events since the last call, in blocks that ``TraceFile`` takes like one event."""
        new, self._new = self._new, []
        blocks: list[bytes] = []
        block: list[str] = []
        length = 0
        for event in new:
            size = len(event) + 2
            if length + size > BLOCK_CHARS and block:
                blocks.append(",\n".join(block).encode())
                block, length = [], 0
            block.append(event)
            length += size
        if block:
            blocks.append(",\n".join(block).encode())
        return blocks

    def add(self, span: Span) -> None:
        """Add one operation."""
        request, submitted, waited, sequence, started, ended, together, error, ready, last = span
        origin, new = self._origin, self._new
        # Operations begun before the recording are shown from its beginning on.
        submitted = max(submitted, origin)
        shape = self._shapes.get(id(request)) or self._learn(request)
        row = self._row(shape.name, submitted, ended)
        why = f',"error":{json.dumps(error[:_TEXT])}' if error else ""
        if not started:
            length = max(ended - submitted - 1, 0) / 1000
            new.append(shape.negotiate % ((submitted - origin) / 1000, length, row, sequence, last, why))
            return
        # The last rank does not wait, but a box without length would be drawn below its neighbour.
        ready = min(max(ready, submitted + 2), started) if ready else started
        # One nanosecond less: readers round, and the next event must not seem to overlap.
        length = max(ready - submitted - 1, 0) / 1000
        new.append(shape.negotiate % ((submitted - origin) / 1000, length, row, sequence, last, ""))
        if started - ready > 1:
            new.append(self._queue % ((ready - origin) / 1000, (started - ready - 1) / 1000, row, sequence))
        begun, length = (started - origin) / 1000, max(ended - started - 1, 0) / 1000
        new.append(shape.execute % (begun, length, row, sequence, why))
        if waited and ended > waited:
            waited = max(waited, origin)
            waiting = self._row(_WAITING, waited, ended)
            new.append(shape.wait % ((waited - origin) / 1000, max(ended - waited - 1, 0) / 1000, waiting, sequence))
        if sequence not in self._seen:
            self._seen.add(sequence)
            if len(self._seen) > _REMEMBERED:
                self._seen = {known for known in self._seen if known > sequence - _REMEMBERED // 2}
            new.append(shape.engine % (begun, length, self._first_row + ENGINE_ROW, sequence, together))
            if self._marks(request.process_set):
                self._instant(CYCLE, started, "g")

    def lost(self, at: int) -> None:
        """Note that operations before ``at`` are missing, because there were too many to keep."""
        self._instant("operations are missing here", at, "p")

    def _instant(self, name: str, at: int, scope: str) -> None:
        self._new.append(
            f'{{"name":"{name}","ph":"i","ts":{(at - self._origin) / 1000:.3f},"pid":{self._process},'
            f'"tid":{self._first_row + ENGINE_ROW},"s":"{scope}"}}'
        )

    def _learn(self, request: Request) -> _Shape:
        kind = request.kind.name
        if request.kind is Kind.ALLREDUCE and request.op is ReduceOp.ADASUM:
            kind = "ADASUM"
        shapes = [list(tensor.shape) for tensor in request.tensors[:_SHAPES]]
        text = ", ".join(map(str, shapes)) + (", ..." if len(request.tensors) > _SHAPES else "")
        nbytes = sum(tensor.nbytes for tensor in request.tensors)
        args = (
            f'"dtype":"{request.tensors[0].dtype if request.tensors else ""}","shape":{json.dumps(text[:_TEXT])},'
            f'"bytes":{nbytes},"set":{request.process_set},"site":{json.dumps(request.site[-_TEXT:])}'
        )
        name = request.name[:_TEXT] or f"{request.kind.name.lower()}.noname"
        if len(self._shapes) >= _REMEMBERED:
            self._shapes.clear()
        # Keep the request, so that its id is not reused.
        process, args = self._process, args.replace("%", "%%")
        shape = self._shapes[id(request)] = _Shape(
            request,
            name,
            _template(process, f"NEGOTIATE_{kind}", '"seq":%d,"last":%d%s'),
            _template(process, kind, f'{args},"seq":%d%s'),
            _template(process, name, '"seq":%d'),
            _template(process, kind, '"seq":%d,"together":%d'),
        )
        return shape

    def _row(self, name: str, start: int, end: int) -> int:
        """Return the row of a name; another row for operations that overlap, as unnamed ones may."""
        if len(self._rows) >= _MOST_ROWS and name not in self._rows:
            name = _MORE
        rows = self._rows.setdefault(name, [])
        for row in rows:
            if self._free_at.get(row, 0) <= start:
                self._free_at[row] = end
                return row
        row = self._next_row
        self._next_row += 1
        rows.append(row)
        self._free_at[row] = end
        self._name_row(row, name if len(rows) == 1 else f"{name} ({len(rows)})")
        return row

    def _name_row(self, row: int, name: str) -> None:
        self._meta("thread_name", row, f'"name":{json.dumps(name)}')
        self._meta("thread_sort_index", row, f'"sort_index":{row}')

    def _meta(self, what: str, row: int, args: str) -> None:
        self._new.append(f'{{"name":"{what}","ph":"M","pid":{self._process},"tid":{row},"args":{{{args}}}}}')
