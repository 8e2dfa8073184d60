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
    plan: _Plan = entry.cache.get("gather", lambda: _gathered(entry))
    inputs = [source.reshape(-1) for source in work.inputs]
    outputs, is_done = _begin(staging, sequence, entry, work, plan, inputs)
    if not is_done:
        _spread(staging, sequence, entry, work, inputs, outputs, plan.counts, copy_own=True, phase=int(plan.is_direct))
    return is_done


class _Part(NamedTuple):
    """A part of a tensor that a rank writes to a result: its elements, its first byte there, and its shape."""

    dtype: str
    rows: slice | None  # None for the whole tensor
    start_bytes: int
    shape: tuple[int, ...]


class _Plan(NamedTuple):
    """This rank's results, and the parts that it writes to the results of others."""

    is_direct: bool
    shapes: list[tuple[int, ...]]  # of this rank's results
    own: list[slice]  # the elements of each result that are this rank's
    parts: list[list[_Part]]  # by member, and then by tensor
    counts: list[list[int]]  # by tensor: each member's number of elements


def _gathered(entry: Entry) -> _Plan:
    response, me = entry.response, entry.me
    own, parts, numbers = [], [], []
    for index, spec in enumerate(response.requests[0].tensors):
        counts = [response.request_of(i).tensors[index].count for i in range(len(response.members))]
        start = sum(counts[:me])
        numbers.append(counts)
        own.append(slice(start, start + counts[me]))
        parts.append(_Part(spec.dtype, None, start * ITEMSIZE[spec.dtype], (counts[me],)))
    return _Plan(is_direct(entry), result_shapes(response, me), own, [parts] * len(response.members), numbers)


def _begin(
    staging: Staging, sequence: int, entry: Entry, work: Work, plan: _Plan, inputs: Sequence[Buffer]
) -> tuple[list[Buffer], bool]:  # fmt: skip
    """Make the results; if possible, write this rank's parts to all of them. Return them, and whether that was done."""
    if not plan.is_direct:
        return [work.allocate(index, shape).reshape(-1) for index, shape in enumerate(plan.shapes)], False
    members, me, copy = entry.response.members, entry.me, kernels_named(work.kernels).copy
    outputs = make_results(staging, sequence, entry, work, plan.shapes)
    for output, own, source, part in zip(outputs, plan.own, inputs, plan.parts[me], strict=True):
        copy(output[own], source if part.rows is None else source[part.rows])
    found = find_results(staging, sequence, entry)
    if found is None:
        return outputs, False
    # Begin with the next member, so that not all write to the same one at the same time.
    for i in (*range(me + 1, len(members)), *range(me)):
        view = staging.arenas[members[i]].view
        for place, source, (dtype, rows, start, shape) in zip(found[i], inputs, plan.parts[i], strict=True):
            if shape[0]:
                target = view(work.kernels, place + start, dtype, shape)
                copy(target, source if rows is None else source[rows])
    return outputs, True


def broadcast(staging: Staging, sequence: int, entry: Entry, work: Work) -> bool:
    """Copy the root's tensors to all members."""
    response = entry.response
    root = response.members.index(response.requests[0].root)
    counts, outputs, inputs = [], [], []
    for index, spec in enumerate(response.requests[0].tensors):
        out = work.allocate(index, spec.shape)
        source = work.inputs[index]
        if entry.me == root and out is not source:
            kernels_named(work.kernels).copy(out, source)
        outputs.append(out.reshape(-1))
        inputs.append(source.reshape(-1))
        counts.append([spec.count if i == root else 0 for i in range(len(response.members))])
    _spread(staging, sequence, entry, work, inputs, outputs, counts, copy_own=False)
    return False


def _spread(
    staging: Staging, sequence: int, entry: Entry, work: Work, inputs: Sequence[Buffer], outputs: Sequence[Buffer],
    counts: Sequence[Sequence[int]], copy_own: bool, phase: int = 0,
) -> None:  # fmt: skip
    """Show the ``counts`` elements of each member to all, which lay them end to end in each output."""
    members, library = entry.response.members, kernels_named(work.kernels)
    dtypes = [spec.dtype for spec in entry.response.requests[0].tensors]
    steps = [CHUNK_BYTES // ITEMSIZE[dtype] for dtype in dtypes]
    rounds = [(index, low) for index in range(len(inputs)) for low in range(0, max(counts[index]), steps[index])]

    def fill(round_: int, offset: int) -> None:
        index, low = rounds[round_]
        high = min(low + steps[index], counts[index][entry.me])
        if low < high:
            slot = staging.arena.view(work.kernels, offset, dtypes[index], (high - low,))
            library.copy(slot, inputs[index][low:high])

    def drain(round_: int, offset: int) -> None:
        index, low = rounds[round_]
        start = 0
        for i, (rank, count) in enumerate(zip(members, counts[index], strict=True)):
            high, at = min(low + steps[index], count), start + low
            start += count
            if low >= high or (i == entry.me and not copy_own):
                continue
            if i == entry.me:
                # This is quicker than reading back the data that this rank has just put into the buffer.
                shown = inputs[index][low:high]
            else:
                shown = staging.arenas[rank].view(work.kernels, offset, dtypes[index], (high - low,))
            library.copy(outputs[index][at : at + high - low], shown)
            if i != entry.me and len(members) == 2:
                staging.clearing.clear(rank, shown, library)

    staging.rounds(sequence, members, len(rounds), fill, drain, phase)


def alltoall(staging: Staging, sequence: int, entry: Entry, work: Work) -> bool:
    """Send the i-th split of this rank's rows to the i-th member; return whether members may still write theirs."""
    plan: _Plan = entry.cache.get("exchange", lambda: _exchanged(entry))
    source = work.inputs[0].reshape(-1)
    (output,), is_done = _begin(staging, sequence, entry, work, plan, [source])
    if not is_done:
        _exchange(staging, sequence, entry, work, source, output, int(plan.is_direct))
    return is_done


def _exchanged(entry: Entry) -> _Plan:
    me, matrix, spec = entry.me, entry.splits, entry.response.request_of(entry.me).tensors[0]
    row, parts = math.prod(spec.shape[1:]), []
    for i, count in enumerate(matrix[me]):
        low, start = sum(matrix[me][:i]) * row, sum(splits[i] for splits in matrix[:me]) * row
        rows = slice(low, low + count * row)
        parts.append([_Part(spec.dtype, rows, start * ITEMSIZE[spec.dtype], (count * row,))])
    first = sum(splits[me] for splits in matrix[:me]) * row
    own = slice(first, first + matrix[me][me] * row)
    return _Plan(is_direct(entry), result_shapes(entry.response, me), [own], parts, [])


def _exchange(
    staging: Staging, sequence: int, entry: Entry, work: Work, source: Buffer, output: Buffer, phase: int
) -> None:
    """Do the alltoall through the staging buffers."""
    library, members, me, matrix = kernels_named(work.kernels), entry.response.members, entry.me, entry.splits
    parts, spec = len(members), entry.response.requests[0].tensors[0]
    dtype, row = spec.dtype, math.prod(spec.shape[1:])
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
