"""Allgather, broadcast and alltoall over shared memory: copies in chunks through the staging buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from horovod.core.collectives import result_shapes
from horovod.core.requests import ITEMSIZE
from horovod.transports.base import Entry, Work
from horovod.transports.kernels import Buffer
from horovod.transports.libraries import kernels_named
from horovod.transports.pieces import LINE
from horovod.transports.shm.direct import find_results, is_direct, make_results
from horovod.transports.shm.staging import CHUNK_BYTES, Staging

__all__ = ["allgather", "alltoall", "broadcast"]


def allgather(staging: Staging, sequence: int, entry: Entry, work: Work) -> bool:
    """Concatenate every member's rows; return whether other members may still write theirs."""
    members, me = entry.response.members, entry.me
    plan: _Gathered = entry.cache.get("gather", lambda: _rows(entry))
    inputs = [source.reshape(-1) for source in work.inputs]
    phase = 0
    if plan.is_direct:
        copy = kernels_named(work.kernels).copy
        outputs = make_results(staging, sequence, entry, work, plan.shapes)
        for output, source, own in zip(outputs, inputs, plan.own, strict=True):
            copy(output[own.rows], source)
        found = find_results(staging, sequence, entry)
        if found is not None:
            # Begin with the next member, so that not all write to the same one at the same time.
            for i in (*range(me + 1, len(members)), *range(me)):
                view = staging.arenas[members[i]].view
                for place, source, own in zip(found[i], inputs, plan.own, strict=True):
                    if own.shape[0]:
                        copy(view(work.kernels, place + own.start_bytes, own.dtype, own.shape), source)
            return True
        phase = 1
    else:
        outputs = [work.allocate(index, shape).reshape(-1) for index, shape in enumerate(plan.shapes)]
    _spread(staging, sequence, entry, work, inputs, outputs, plan.counts, plan.starts, copy_own=not phase, phase=phase)
    return False


class _Part(NamedTuple):
    """A part of a tensor that a rank writes to a result: its elements, its first byte there, and its shape."""

    dtype: str
    rows: slice
    start_bytes: int
    shape: tuple[int, ...]


class _Gathered(NamedTuple):
    """By tensor: each member's number of elements, their start, the shape of the whole, and this rank's own part."""

    is_direct: bool
    counts: list[list[int]]
    starts: list[list[int]]
    shapes: list[tuple[int, ...]]
    own: list[_Part]


def _rows(entry: Entry) -> _Gathered:
    response, me = entry.response, entry.me
    found = _Gathered(is_direct(entry), [], [], result_shapes(response, me), [])
    for index, spec in enumerate(response.requests[0].tensors):
        specs = [response.request_of(i).tensors[index] for i in range(len(response.members))]
        counts = [s.count for s in specs]
        starts = [sum(counts[:i]) for i in range(len(specs))]
        found.counts.append(counts)
        found.starts.append(starts)
        rows = slice(starts[me], starts[me] + counts[me])
        found.own.append(_Part(spec.dtype, rows, starts[me] * ITEMSIZE[spec.dtype], (counts[me],)))
    return found


def broadcast(staging: Staging, sequence: int, entry: Entry, work: Work) -> bool:
    """Copy the root's tensors to all members."""
    response = entry.response
    root = response.members.index(response.requests[0].root)
    counts, starts, outputs, inputs = [], [], [], []
    for index, spec in enumerate(response.requests[0].tensors):
        out = work.allocate(index, spec.shape)
        source = work.inputs[index]
        if entry.me == root and out is not source:
            kernels_named(work.kernels).copy(out, source)
        outputs.append(out.reshape(-1))
        inputs.append(source.reshape(-1))
        counts.append([spec.count if i == root else 0 for i in range(len(response.members))])
        starts.append([0] * len(response.members))
    _spread(staging, sequence, entry, work, inputs, outputs, counts, starts, copy_own=False)
    return False


def _spread(
    staging: Staging,
    sequence: int,
    entry: Entry,
    work: Work,
    inputs: Sequence[object],
    outputs: Sequence[object],
    counts: Sequence[Sequence[int]],
    starts: Sequence[Sequence[int]],
    copy_own: bool = True,
    phase: int = 0,
) -> None:
    """Show the ``counts`` elements of each member to all; they go to ``starts`` of each output."""
    members, library = entry.response.members, kernels_named(work.kernels)
    dtypes = [spec.dtype for spec in entry.response.requests[0].tensors]
    steps = [CHUNK_BYTES // ITEMSIZE[dtype] for dtype in dtypes]
    rounds = [(index, low) for index in range(len(inputs)) for low in range(0, max(counts[index]), steps[index])]

    def fill(round_: int, offset: int) -> None:
        index, low = rounds[round_]
        high = min(low + steps[index], counts[index][entry.me])
        if low < high:
            slot = staging.arena.view(work.kernels, offset, dtypes[index], (high - low,))
            library.copy(slot, inputs[index][low:high])  # type: ignore[index]

    def drain(round_: int, offset: int) -> None:
        index, low = rounds[round_]
        for i, rank in enumerate(members):
            high = min(low + steps[index], counts[index][i])
            if low >= high or (i == entry.me and not copy_own):
                continue
            if i == entry.me:
                # This is quicker than reading back the data that this rank has just put into the buffer.
                shown = inputs[index][low:high]  # type: ignore[index]
            else:
                shown = staging.arenas[rank].view(work.kernels, offset, dtypes[index], (high - low,))
            start = starts[index][i]
            library.copy(outputs[index][start + low : start + high], shown)  # type: ignore[index]
            if i != entry.me and len(members) == 2:
                staging.clearing.clear(rank, shown, library)

    staging.rounds(sequence, members, len(rounds), fill, drain, phase)


def alltoall(staging: Staging, sequence: int, entry: Entry, work: Work) -> bool:
    """Send the i-th split of this rank's rows to the i-th member; return whether members may still write theirs."""
    members, me = entry.response.members, entry.me
    plan: _Exchanged = entry.cache.get("exchange", lambda: _splits(entry))
    source = work.inputs[0].reshape(-1)
    phase = 0
    if plan.is_direct:
        copy = kernels_named(work.kernels).copy
        (output,) = make_results(staging, sequence, entry, work, [plan.shape])
        copy(output[plan.own], source[plan.parts[me].rows])
        found = find_results(staging, sequence, entry)
        if found is not None:
            # Begin with the next member, so that not all write to the same one at the same time.
            for i in (*range(me + 1, len(members)), *range(me)):
                part = plan.parts[i]
                if part.shape[0]:
                    at = found[i][0] + part.start_bytes
                    view = staging.arenas[members[i]].view(work.kernels, at, part.dtype, part.shape)
                    copy(view, source[part.rows])
            return True
        phase = 1
    else:
        output = work.allocate(0, plan.shape).reshape(-1)
    _exchange(staging, sequence, entry, work, plan.row, source, output, phase)
    return False


class _Exchanged(NamedTuple):
    """The shape of this rank's result, elements of a row, its own part of the result, and the part for each member."""

    is_direct: bool
    shape: tuple[int, ...]
    row: int
    own: slice
    parts: list[_Part]


def _splits(entry: Entry) -> _Exchanged:
    me, matrix, spec = entry.me, entry.splits, entry.response.request_of(entry.me).tensors[0]
    row, parts = math.prod(spec.shape[1:]), []
    for i, count in enumerate(matrix[me]):
        low, start = sum(matrix[me][:i]) * row, sum(splits[i] for splits in matrix[:me]) * row
        rows = slice(low, low + count * row)
        parts.append(_Part(spec.dtype, rows, start * ITEMSIZE[spec.dtype], (count * row,)))
    first = sum(splits[me] for splits in matrix[:me]) * row
    return _Exchanged(
        is_direct(entry), result_shapes(entry.response, me)[0], row, slice(first, first + matrix[me][me] * row), parts
    )


def _exchange(
    staging: Staging, sequence: int, entry: Entry, work: Work, row: int, source: Buffer, output: Buffer, phase: int
) -> None:
    """Do the alltoall through the staging buffers."""
    library, members, me, matrix = kernels_named(work.kernels), entry.response.members, entry.me, entry.splits
    parts, dtype = len(members), entry.response.requests[0].tensors[0].dtype
    received = [splits[me] for splits in matrix]
    part_bytes = CHUNK_BYTES // parts // LINE * LINE
    step = part_bytes // ITEMSIZE[dtype]
    rounds = -(-max(max(splits) for splits in matrix) * row // step)

    def fill(round_: int, offset: int) -> None:
        start = 0
        for i in range(parts):
            low, stop = start + round_ * step, start + matrix[me][i] * row
            high = min(low + step, stop)
            if low < high and i != me:
                slot = staging.arena.view(work.kernels, offset + i * part_bytes, dtype, (high - low,))
                library.copy(slot, source[low:high])
            start = stop

    def drain(round_: int, offset: int) -> None:
        start = 0
        for i, rank in enumerate(members):
            low, stop = start + round_ * step, start + received[i] * row
            high = min(low + step, stop)
            if low < high and i != me:
                view = staging.arenas[rank].view(work.kernels, offset + me * part_bytes, dtype, (high - low,))
                library.copy(output[low:high], view)
                staging.clearing.clear(rank, view, library)
            elif low < high:
                first = sum(matrix[me][:me]) * row + round_ * step
                library.copy(output[low:high], source[first : first + high - low])
            start = stop

    staging.rounds(sequence, members, rounds, fill, drain, phase, part_bytes * (parts - 1))
