"""Allreduce of tensors in the arena, and reducescatter of tensors in the arena and elsewhere.

Every element is reduced by one rank (or, where all ranks reduce, in one order), so all ranks see the same
bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from horovod.core.collectives import result_shapes
from horovod.core.requests import ITEMSIZE
from horovod.splits import part_of
from horovod.transports.base import Entry, Work
from horovod.transports.kernels import Buffer, Kernels, Reducer
from horovod.transports.libraries import kernels_named
from horovod.transports.pieces import LINE
from horovod.transports.shm.arena import BLOCK_BYTES
from horovod.transports.shm.control import PHASE_BITS
from horovod.transports.shm.direct import find_results, is_placed, make_results
from horovod.transports.shm.staging import CHUNK_BYTES, Staging

__all__ = ["allreduce_arena", "allreduce_fresh", "lives_in_arena", "reducescatter"]


def lives_in_arena(entry: Entry) -> bool:
    """Whether all tensors of all members lie in arenas, and are to be reduced there."""
    return all(is_placed(request) for request in entry.response.requests)


class _Block(NamedTuple):
    reduce: Reducer
    target: Buffer
    sources: list[Buffer]
    copies: list[Buffer]


def allreduce_arena(staging: Staging, sequence: int, entry: Entry, work: Work) -> bool:
    """Reduce this rank's slice over all arenas and write it to all of them.

    Return whether the others' slices may still be missing. There is no need to wait for them here: this rank can
    do its part of the next entries meanwhile.
    """
    members, base = entry.response.members, sequence << PHASE_BITS

    def make() -> list[_Block]:
        made = _blocks(staging, entry, work.kernels, _placements(entry))
        staging.budget.charge(entry.cache, len(made) * len(members))
        return made

    blocks = entry.cache.get("arena", make)
    if entry.response.requests[0].device != "cpu":
        # The request was submitted before its data had come from the device.
        staging.flags.post(base | 1, members)
        staging.flags.wait(members, base | 1)
    _reduce(blocks, kernels_named(work.kernels))
    return True


def allreduce_fresh(staging: Staging, sequence: int, entry: Entry, work: Work) -> bool:
    """Copy ordinary tensors to the place of their new results, in the arena, and reduce them there.

    Return whether it was done; the others' slices may still be missing. If not, two phases of the entry are over.
    """
    members, base = entry.response.members, sequence << PHASE_BITS
    library, tensors = kernels_named(work.kernels), entry.response.requests[0].tensors
    results = make_results(staging, sequence, entry, work, [spec.shape for spec in tensors], least=1)
    for result, source in zip(results, work.inputs, strict=True):
        library.copy(result, source.reshape(-1))
    staging.flags.post(base | 2, members)
    places = find_results(staging, sequence, entry)
    staging.flags.wait(members, base | 2)
    if places is None:
        return False
    _reduce(_blocks(staging, entry, work.kernels, places), library)
    return True


def _reduce(blocks: Sequence[_Block], library: Kernels) -> None:
    copy = library.copy
    for reduce, target, sources, copies in blocks:
        reduce(target, sources)
        for other in copies:
            copy(other, target)


def _placements(entry: Entry) -> list[tuple[int, ...]]:
    return [entry.response.request_of(i).placement for i in range(len(entry.response.members))]


def _blocks(staging: Staging, entry: Entry, kernels: str, places: Sequence[tuple[int, ...]]) -> list[_Block]:
    """Return the blocks that this rank reduces; the tensors lie, by member, at ``places`` in the arenas."""
    response, library = entry.response, kernels_named(kernels)
    first = response.requests[0]
    members = response.members
    blocks = []
    for index, spec in enumerate(first.tensors):
        reduce = library.reducer(spec.dtype, first.op, first.prescale, first.postscale, response.divisor)
        itemsize = ITEMSIZE[spec.dtype]
        wholes = [
            staging.arenas[rank].view_once(kernels, of_rank[index], spec.dtype, (spec.count,))
            for rank, of_rank in zip(members, places, strict=True)
        ]
        lines = -(-spec.count * itemsize // LINE)
        start, stop = (line * LINE // itemsize for line in part_of(lines, len(members), entry.me))
        step = BLOCK_BYTES // itemsize
        scratch = library.scratch(spec.dtype, step) if len(members) > 2 else None
        for low in range(start, min(stop, spec.count), step):
            high = min(low + step, stop, spec.count)
            sources = [whole[low:high] for whole in wholes]
            if scratch is None:
                blocks.append(_Block(reduce, sources[entry.me], sources, [sources[1 - entry.me]]))
            else:
                blocks.append(_Block(reduce, scratch[: high - low], sources, sources))
    return blocks


def reducescatter(staging: Staging, sequence: int, entry: Entry, work: Work) -> bool:
    """Reduce, and leave each rank its own rows; return whether other members may still read this rank's tensor."""
    if lives_in_arena(entry):
        for index, rows in enumerate(entry.cache.get("arena", lambda: _own_rows(staging, entry, work.kernels))):
            output = work.allocate(index, rows.shape).reshape(-1)
            for low, high, sources in rows.blocks:
                rows.reduce(output[low:high], sources)
        return True
    _scatter_staged(staging, sequence, entry, work)
    return False


class _Rows(NamedTuple):
    """This rank's rows of a tensor, and all members' values of these rows in the arenas."""

    reduce: Reducer
    shape: tuple[int, ...]
    blocks: list[tuple[int, int, list[Buffer]]]


def _own_rows(staging: Staging, entry: Entry, kernels: str) -> list[_Rows]:
    response, library = entry.response, kernels_named(kernels)
    request, members = response.requests[0], response.members
    found = []
    for index, spec in enumerate(request.tensors):
        reduce = library.reducer(spec.dtype, request.op, request.prescale, request.postscale, response.divisor)
        start, stop = part_of(spec.shape[0], len(members), entry.me)
        row = math.prod(spec.shape[1:])
        wholes = [
            staging.arenas[rank].view_once(kernels, places[index], spec.dtype, (spec.count,))
            for rank, places in zip(members, _placements(entry), strict=True)
        ]
        step, count = BLOCK_BYTES // ITEMSIZE[spec.dtype], row * (stop - start)
        blocks = []
        for low in range(0, count, step):
            high = min(low + step, count)
            blocks.append((low, high, [whole[row * start + low : row * start + high] for whole in wholes]))
        found.append(_Rows(reduce, (stop - start, *spec.shape[1:]), blocks))
    staging.budget.charge(entry.cache, sum(len(rows.blocks) for rows in found) * len(members))
    return found


def _scatter_staged(staging: Staging, sequence: int, entry: Entry, work: Work) -> None:
    response, library, me = entry.response, kernels_named(work.kernels), entry.me
    request, members = response.requests[0], response.members
    parts = len(members)
    part_bytes = CHUNK_BYTES // parts // LINE * LINE
    steps = [part_bytes // ITEMSIZE[spec.dtype] for spec in request.tensors]
    inputs = [source.reshape(-1) for source in work.inputs]
    outputs = [work.allocate(index, shape).reshape(-1) for index, shape in enumerate(result_shapes(response, me))]
    rounds: list[tuple[int, int]] = []
    bounds, reducers = [], []
    for index, spec in enumerate(request.tensors):
        row = math.prod(spec.shape[1:])
        bounds.append([tuple(row * r for r in part_of(spec.shape[0], parts, i)) for i in range(parts)])
        reducers.append(library.reducer(spec.dtype, request.op, request.prescale, request.postscale, response.divisor))
        longest = max(stop - start for start, stop in bounds[index])
        rounds += [(index, start) for start in range(0, longest, steps[index])]

    def part(index: int, start: int, owner: int) -> tuple[int, int]:
        low, high = bounds[index][owner]
        return min(low + start, high), min(low + start + steps[index], high)

    def view(rank: int, at: int, index: int, count: int) -> Buffer:
        return staging.arenas[rank].view(work.kernels, at, request.tensors[index].dtype, (count,))

    def fill(round_: int, offset: int) -> None:
        index, start = rounds[round_]
        for owner in range(parts):
            low, high = part(index, start, owner)
            if owner != me and low < high:
                slot = view(staging.rank, offset + owner * part_bytes, index, high - low)
                library.copy(slot, inputs[index][low:high])

    def drain(round_: int, offset: int) -> None:
        index, start = rounds[round_]
        low, high = part(index, start, me)
        if low >= high:
            return
        own = inputs[index][low:high]
        at, base = offset + me * part_bytes, bounds[index][me][0]
        sources = [own if i == me else view(rank, at, index, high - low) for i, rank in enumerate(members)]
        reducers[index](outputs[index][low - base : high - base], sources)
        for i, rank in enumerate(members):
            if i != me:
                staging.clearing.clear(rank, sources[i], library)

    staging.rounds(sequence, members, len(rounds), fill, drain, filled=part_bytes * (parts - 1))
