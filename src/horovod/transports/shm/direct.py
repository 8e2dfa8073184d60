"""Collectives in which members write their parts straight to the results of all, in arenas: one copy of each byte.

Each member makes its results, publishes their places, does its own part meanwhile, and then writes to the other
results. A result is complete when all members have finished. If one member's result lies elsewhere because the arena
is full, all members see that, and use the staging buffers instead. If a framework makes its own results, as a graph
does, the request says so, and the members do not publish places.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from horovod.core.requests import ITEMSIZE, Request
from horovod.transports.base import Entry, Work
from horovod.transports.kernels import Buffer, Kernels, Reducer
from horovod.transports.libraries import kernels_named
from horovod.transports.pieces import LINE
from horovod.transports.shm.arena import BLOCK_BYTES, INLINE_BYTES
from horovod.transports.shm.control import PHASE_BITS
from horovod.transports.shm.staging import Staging

__all__ = [
    "DIRECT_BYTES",
    "FRESH",
    "allreduce_direct",
    "find_results",
    "is_direct",
    "is_fresh",
    "is_placed",
    "make_results",
]

#: In a request, the place of a result that this transport may make.
FRESH = -1

#: Below this size, one more meeting takes longer than one copy less saves.
DIRECT_BYTES = 512 << 10
#: From this size on, more than two ranks gain more by meeting seldom than they lose because copies leave the caches.
_SEVERAL_BYTES = 2 << 20
#: A part of a result may be small, where parts are uneven.
_LEAST_PART = 64 << 10


def is_direct(entry: Entry) -> bool:
    """Whether all members try to write to each other's results; the same for all of them.

    They do not if one member's request says that it makes its results in private memory.
    """
    requests = entry.response.requests
    return entry.most_bytes >= DIRECT_BYTES and all(bool(r.placement) and r.device == "cpu" for r in requests)


def is_placed(request: Request) -> bool:
    """Whether the tensors of a request lie in the arena."""
    return bool(request.placement) and request.placement[0] != FRESH


def is_fresh(entry: Entry) -> bool:
    """Whether members reduce into new tensors that all can write; more than two members gain only at larger sizes."""
    response = entry.response
    if not all(bool(request.placement) and request.placement[0] == FRESH for request in response.requests):
        return False
    several = sum(spec.nbytes for spec in response.requests[0].tensors) >= _SEVERAL_BYTES
    return is_direct(entry) and (len(response.members) == 2 or several)


def make_results(
    staging: Staging, sequence: int, entry: Entry, work: Work, shapes: Sequence[tuple[int, ...]],
    least: int = _LEAST_PART,
) -> list[Buffer]:  # fmt: skip
    """Make this rank's results, publish their places to the other members in the staging buffers, and return them, each
    as one row. Other members cannot use a result of less than ``least`` bytes.
    """
    pool, tensors, library = staging.results, entry.response.requests[0].tensors, kernels_named(work.kernels)
    places: list[int] = []
    own: list[Buffer] = []

    def lend(nbytes: int) -> Any:
        memory = pool.take(nbytes, least)
        if memory is not None:
            places.append(pool.place)
        return memory

    work.lend = lend
    for index, shape in enumerate(shapes):
        output = work.allocate(index, shape).reshape(-1)
        own.append(output)
        if len(places) == index:
            # The output lies in the arena already, or is too small to be lent.
            nbytes = math.prod(shape) * ITEMSIZE[tensors[index].dtype]
            places.append(staging.arena.offset_of(library.raw(output).ctypes.data) if nbytes else 0)
    members = entry.response.members
    staging.reserve(sequence, members)
    struct.pack_into(f"<{len(places)}q", staging.arena.memory, INLINE_BYTES, *places)
    staging.flags.post(sequence << PHASE_BITS | 1, members)
    return own


def find_results(staging: Staging, sequence: int, entry: Entry) -> list[tuple[int, ...]] | None:
    """Return where every member's results lie, in the order of members; None if one of them cannot be reached."""
    members, count = entry.response.members, len(entry.response.requests[0].tensors)
    staging.flags.wait(members, sequence << PHASE_BITS | 1)
    found = [struct.unpack_from(f"<{count}q", staging.arenas[rank].memory, INLINE_BYTES) for rank in members]
    return None if any(-1 in places for places in found) else found


def allreduce_direct(staging: Staging, sequence: int, entry: Entry, work: Work) -> bool:
    """Reduce a half on each of two members into both results; first the other copies its input of this half there.

    Return whether it was done. If not, one phase of the entry is over.
    """
    request, members, me = entry.response.requests[0], entry.response.members, entry.me
    outputs = make_results(staging, sequence, entry, work, [spec.shape for spec in request.tensors])
    inputs = [source.reshape(-1) for source in work.inputs]
    found = find_results(staging, sequence, entry)
    if found is None:
        return False
    library, arena, base = kernels_named(work.kernels), staging.arenas[members[1 - me]], sequence << PHASE_BITS
    halves, copy = entry.cache.get("halves", lambda: _halves(entry, library)), library.copy
    others = [
        arena.view(work.kernels, place, spec.dtype, (spec.count,)) if spec.count else outputs[index]
        for index, (place, spec) in enumerate(zip(found[1 - me], request.tensors, strict=True))
    ]
    for half, source, other in zip(halves, inputs, others, strict=True):
        if half.low_of_other < half.high_of_other:
            theirs = slice(half.low_of_other, half.high_of_other)
            copy(other[theirs], source[theirs])
    staging.flags.post(base | 2, members)
    staging.flags.wait(members, base | 2)
    for half, source, other, output in zip(halves, inputs, others, outputs, strict=True):
        for block in half.blocks:
            target, own = output[block], source[block]
            half.reduce(target, [target, own] if me else [own, target])
            copy(other[block], target)
    return True


class _Half(NamedTuple):
    """The part of a tensor that a member reduces, in blocks that fit into a cache, and the part of the other member."""

    reduce: Reducer
    blocks: list[slice]
    low_of_other: int
    high_of_other: int


def _halves(entry: Entry, library: Kernels) -> list[_Half]:
    request, divisor = entry.response.requests[0], entry.response.divisor
    found = []
    for spec in request.tensors:
        itemsize = ITEMSIZE[spec.dtype]
        middle = min(-(-spec.count * itemsize // LINE) // 2 * LINE // itemsize, spec.count)
        parts = ((0, middle), (middle, spec.count))
        (start, stop), (low, high) = parts[entry.me], parts[1 - entry.me]
        step = BLOCK_BYTES // itemsize
        blocks = [slice(at, min(at + step, stop)) for at in range(start, stop, step)]
        reduce = library.reducer(spec.dtype, request.op, request.prescale, request.postscale, divisor)
        found.append(_Half(reduce, blocks, low, high))
    return found
