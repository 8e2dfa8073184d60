"""Allgather, broadcast and alltoall over shared memory: copies in chunks through the staging buffers."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns

from horovod.core.requests import ITEMSIZE
from horovod.transports.base import Entry, Work
from horovod.transports.libraries import kernels_named
from horovod.transports.shm.staging import CHUNK_BYTES, Staging

__all__ = ["allgather", "alltoall", "broadcast"]

_ALIGN = 64


def allgather(staging: Staging, sequence: int, entry: Entry, work: Work) -> bool:
    """Concatenate every member's rows."""
    response = entry.response
    counts, starts, outputs, inputs = [], [], [], []
    for index, spec in enumerate(response.requests[0].tensors):
        specs = [response.request_of(i).tensors[index] for i in range(len(response.members))]
        rows = sum(s.shape[0] for s in specs)
        outputs.append(work.allocate(index, (rows, *spec.shape[1:])).reshape(-1))
        inputs.append(work.inputs[index].reshape(-1))
        counts.append([s.count for s in specs])
        starts.append([sum(counts[index][:i]) for i in range(len(specs))])
    _spread(staging, sequence, entry, work, inputs, outputs, counts, starts)
    return False


def broadcast(staging: Staging, sequence: int, entry: Entry, work: Work) -> bool:
    """Copy the root's tensors to everybody."""
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
) -> None:
    """Everybody shows its ``counts`` elements to all; they land at ``starts`` of each output."""
    members, library, eviction = entry.response.members, kernels_named(work.kernels), staging.eviction
    copy, pair = library.copy, len(members) == 2
    dtypes = [spec.dtype for spec in entry.response.requests[0].tensors]
    steps = [CHUNK_BYTES // ITEMSIZE[dtype] for dtype in dtypes]
    rounds = [(index, low) for index in range(len(inputs)) for low in range(0, max(counts[index]), steps[index])]

    def fill(round_: int, offset: int) -> None:
        index, low = rounds[round_]
        high = min(low + steps[index], counts[index][entry.me])
        if low < high:
            slot = staging.arena.view(work.kernels, offset, dtypes[index], (high - low,))
            began = monotonic_ns()
            copy(slot, inputs[index][low:high])  # type: ignore[index]
            if pair:
                eviction.note((high - low) * ITEMSIZE[dtypes[index]], monotonic_ns() - began)

    def drain(round_: int, offset: int) -> None:
        index, low = rounds[round_]
        for i, rank in enumerate(members):
            high = min(low + steps[index], counts[index][i])
            if low >= high or (i == entry.me and not copy_own):
                continue
            if i == entry.me:
                # Quicker than to read back what this rank has just put into the buffer.
                shown = inputs[index][low:high]  # type: ignore[index]
            else:
                shown = staging.arenas[rank].view(work.kernels, offset, dtypes[index], (high - low,))
            start = starts[index][i]
            copy(outputs[index][start + low : start + high], shown)  # type: ignore[index]
            if pair and i != entry.me:
                eviction.evict(rank, shown, library)

    staging.rounds(sequence, members, len(rounds), fill, drain)


def alltoall(staging: Staging, sequence: int, entry: Entry, work: Work) -> bool:
    """Send the i-th split of this rank's rows to the i-th member."""
    response, library, eviction = entry.response, kernels_named(work.kernels), staging.eviction
    copy = library.copy
    members, me, parts = response.members, entry.me, len(response.members)
    spec = response.request_of(me).tensors[0]
    row = 1
    for dim in spec.shape[1:]:
        row *= dim
    matrix = entry.splits
    received = [matrix[i][me] for i in range(parts)]
    output = work.allocate(0, (sum(received), *spec.shape[1:])).reshape(-1)
    source = work.inputs[0].reshape(-1)
    part_bytes = CHUNK_BYTES // parts // _ALIGN * _ALIGN
    step = part_bytes // ITEMSIZE[spec.dtype]
    rounds = -(-max(max(splits) for splits in matrix) * row // step)

    def fill(round_: int, offset: int) -> None:
        start, filled, began = 0, 0, monotonic_ns()
        for i in range(parts):
            low, stop = start + round_ * step, start + matrix[me][i] * row
            high = min(low + step, stop)
            if low < high and i != me:
                slot = staging.arena.view(work.kernels, offset + i * part_bytes, spec.dtype, (high - low,))
                copy(slot, source[low:high])
                filled += high - low
            start = stop
        eviction.note(filled * ITEMSIZE[spec.dtype], monotonic_ns() - began)

    def drain(round_: int, offset: int) -> None:
        start = 0
        for i, rank in enumerate(members):
            low, stop = start + round_ * step, start + received[i] * row
            high = min(low + step, stop)
            if low < high and i != me:
                view = staging.arenas[rank].view(work.kernels, offset + me * part_bytes, spec.dtype, (high - low,))
                copy(output[low:high], view)
                eviction.evict(rank, view, library)
            elif low < high:
                first = sum(matrix[me][:me]) * row + round_ * step
                copy(output[low:high], source[first : first + high - low])
            start = stop

    staging.rounds(sequence, members, rounds, fill, drain)
    return False
