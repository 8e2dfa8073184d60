"""Allreduce and reducescatter over shared memory.

Every element is reduced by one rank (or, where all ranks reduce, in one order), so all ranks see the same
bits. For two ranks it is cheapest that both read everything; for more, rank k reduces the k-th part of each
chunk and the others collect it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from horovod.core.requests import ITEMSIZE, Response
from horovod.transports.base import Entry, Work
from horovod.transports.kernels import Buffer, Reducer
from horovod.transports.libraries import kernels_named
from horovod.transports.shm.control import PHASE_BITS
from horovod.transports.shm.staging import CHUNK_BYTES, Staging

__all__ = ["allreduce_arena", "allreduce_staged", "lives_in_arena", "reducescatter", "slice_rows"]

_ALIGN = 64
#: Up to this size, a few ranks rather read everything than synchronise twice per chunk.
_READ_ALL_BYTES = 256 << 10


def _block_bytes() -> int:
    # Two inputs and a result should fit into a core's own cache.
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        size = int(text.removesuffix("K").removesuffix("M")) * (1 << 20 if text.endswith("M") else 1 << 10)
    except (OSError, ValueError):
        size = 1 << 20
    return min(max(size // 4, 64 << 10), 1 << 20)


_BLOCK_BYTES = _block_bytes()
_CHUNK = 512 << 10
#: Rounds whose views an entry remembers.
_KNOWN_ROUNDS = 256


def slice_rows(rows: int, parts: int, index: int) -> tuple[int, int]:
    """Return which rows the ``index``-th of ``parts`` gets: near-even, the first ones one more."""
    base, extra = divmod(rows, parts)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


def lives_in_arena(entry: Entry) -> bool:
    """Whether every member's every tensor is to be reduced where it lies."""
    return all(tensor.offset >= 0 for request in entry.response.requests for tensor in request.tensors)


class _Block(NamedTuple):
    reduce: Reducer
    target: Buffer
    sources: list[Buffer]
    copies: list[Buffer]


def allreduce_arena(staging: Staging, sequence: int, entry: Entry, work: Work) -> bool:
    """Reduce this rank's slice over all arenas and write it to all of them.

    Returns:
        Whether the others' slices may still be missing. There is no need to wait for them here: this rank can
        do its part of the next entries meanwhile.
    """
    if entry.arena_plan is None:
        entry.arena_plan = _arena_blocks(staging, entry, work.kernels)
    copy, members, base = kernels_named(work.kernels).copy, entry.response.members, sequence << PHASE_BITS
    from_device = entry.response.requests[0].device != "cpu"
    if from_device:
        # The request was submitted before its data had come from the device.
        staging.flags.post(base | 1, members)
        staging.flags.wait(members, base | 1)
    for reduce, target, sources, copies in entry.arena_plan:
        reduce(target, sources)
        for other in copies:
            copy(other, target)
    if from_device:
        # The way back to the device begins at once.
        staging.flags.post(base | 2, members)
        staging.flags.wait(members, base | 2)
    return not from_device


def _arena_blocks(staging: Staging, entry: Entry, kernels: str) -> list[_Block]:
    response, library = entry.response, kernels_named(kernels)
    first = response.requests[0]
    members = response.members
    blocks = []
    for index, spec in enumerate(first.tensors):
        reduce = library.reducer(spec.dtype, first.op, first.prescale, first.postscale, response.divisor)
        itemsize = ITEMSIZE[spec.dtype]
        wholes = [
            staging.arenas[rank].view(kernels, response.request_of(i).tensors[index].offset, spec.dtype, (spec.count,))
            for i, rank in enumerate(members)
        ]
        lines = -(-spec.count * itemsize // _ALIGN)
        start, stop = (line * _ALIGN // itemsize for line in slice_rows(lines, len(members), entry.me))
        step = _BLOCK_BYTES // itemsize
        scratch = library.scratch(spec.dtype, step) if len(members) > 2 else None
        for low in range(start, min(stop, spec.count), step):
            high = min(low + step, stop, spec.count)
            sources = [whole[low:high] for whole in wholes]
            if scratch is None:
                blocks.append(_Block(reduce, sources[entry.me], sources, [sources[1 - entry.me]]))
            else:
                blocks.append(_Block(reduce, scratch[: high - low], sources, sources))
    return blocks


class _Piece(NamedTuple):
    segment: int
    low: int
    high: int
    position: int


def _pieces(nbytes: Sequence[int], itemsizes: Sequence[int], start: int, stop: int) -> list[_Piece]:
    """Cut [start, stop) of the segments, laid end to end on cache lines, into pieces of one segment each."""
    pieces = []
    base = 0
    for segment, (length, itemsize) in enumerate(zip(nbytes, itemsizes, strict=True)):
        low, high = max(start - base, 0), min(stop - base, length)
        if low < high:
            pieces.append(_Piece(segment, low // itemsize, high // itemsize, base + low - start))
        base += -(-length // _ALIGN) * _ALIGN
        if base >= stop:
            break
    return pieces


class _Segments:
    """The tensors of one or several works, laid end to end; each work may be of another array library."""

    def __init__(self, batch: Sequence[tuple[Entry, Work]]) -> None:
        self.inputs: list[Buffer] = []
        self.outputs: list[Buffer] = []
        self.dtypes: list[str] = []
        self.reducers: list[Reducer] = []
        self.nbytes: list[int] = []
        self.kernels: list[str] = []
        self.copies: list[Callable[[Buffer, Buffer], None]] = []
        for entry, work in batch:
            library = kernels_named(work.kernels)
            response: Response = entry.response
            request = response.requests[0]
            for index, spec in enumerate(request.tensors):
                self.inputs.append(work.inputs[index].reshape(-1))
                self.outputs.append(work.allocate(index, spec.shape).reshape(-1))
                self.dtypes.append(spec.dtype)
                self.nbytes.append(spec.nbytes)
                self.kernels.append(work.kernels)
                self.copies.append(library.copy)
                self.reducers.append(
                    library.reducer(spec.dtype, request.op, request.prescale, request.postscale, response.divisor)
                )
        self.itemsizes = [ITEMSIZE[dtype] for dtype in self.dtypes]
        self.total = sum(-(-length // _ALIGN) * _ALIGN for length in self.nbytes)

    def chunk(self, round_: int, chunk_bytes: int) -> list[_Piece]:
        return _pieces(self.nbytes, self.itemsizes, round_ * chunk_bytes, min((round_ + 1) * chunk_bytes, self.total))


def allreduce_staged(staging: Staging, sequence: int, batch: Sequence[tuple[Entry, Work]]) -> None:
    """Reduce ordinary tensors, several works at once when they were fused."""
    entry, _ = batch[0]
    segments = _Segments(batch)
    members = entry.response.members
    if len(members) == 2 or (len(members) <= 4 and segments.total <= _READ_ALL_BYTES):
        # Fused works meet by chance; what passes alone is likely to come again.
        _read_all(staging, sequence, entry, segments, entry.staged_plan if len(batch) == 1 else {})
    else:
        _by_owner(staging, sequence, members, entry.me, segments)


class _Passage(NamedTuple):
    """A piece, its place in this rank's staging buffer, and all members' places, in their order."""

    segment: int
    low: int
    high: int
    slot: Buffer
    sources: list[Buffer]


def _read_all(staging: Staging, sequence: int, entry: Entry, segments: _Segments, known: dict[int, list[Any]]) -> None:
    """Let every rank reduce everything; ``known`` keeps the passages of each round for the next time."""
    arenas, members, me = staging.arenas, entry.response.members, entry.me
    kernels, copies, dtypes = segments.kernels, segments.copies, segments.dtypes
    inputs, outputs, reducers = segments.inputs, segments.outputs, segments.reducers
    # Of two inputs the result may overwrite either, so this rank's own need not be read back from the buffer.
    pair = len(members) == 2
    chunk_bytes = min(CHUNK_BYTES, _CHUNK)

    def passages(round_: int, offset: int) -> list[_Passage]:
        found = known.get(round_)
        if found is None:
            found = []
            for segment, low, high, position in segments.chunk(round_, chunk_bytes):
                at, shape = offset + position, (high - low,)
                views = [arenas[rank].view(kernels[segment], at, dtypes[segment], shape) for rank in members]
                found.append(_Passage(segment, low, high, views[me], views))
            if len(known) < _KNOWN_ROUNDS:
                known[round_] = found
        return found

    def fill(round_: int, offset: int) -> None:
        for segment, low, high, slot, _ in passages(round_, offset):
            copies[segment](slot, inputs[segment][low:high])

    def drain(round_: int, offset: int) -> None:
        for segment, low, high, _, sources in passages(round_, offset):
            if pair:
                own, other = inputs[segment][low:high], sources[1 - me]
                sources = [other, own] if me else [own, other]
            reducers[segment](outputs[segment][low:high], sources)

    staging.rounds(sequence, members, -(-segments.total // chunk_bytes), fill, drain)


def _by_owner(staging: Staging, sequence: int, members: Sequence[int], me: int, segments: _Segments) -> None:
    arenas, arena = staging.arenas, staging.arena
    kernels, copies = segments.kernels, segments.copies
    inputs, outputs, dtypes, reducers = segments.inputs, segments.outputs, segments.dtypes, segments.reducers
    lines = -(-segments.total // _ALIGN)
    rounds = -(-segments.total // CHUNK_BYTES)

    def part(round_: int, owner: int) -> tuple[list[_Piece], int]:
        first, last = slice_rows(lines, rounds, round_)
        low, high = slice_rows(last - first, len(members), owner)
        start, stop = (first + low) * _ALIGN, min((first + high) * _ALIGN, segments.total)
        return _pieces(segments.nbytes, segments.itemsizes, start, stop), low * _ALIGN

    def fill(round_: int, offset: int) -> None:
        # This rank's own part need not be shown, but to leave it out would cut the copy in two.
        first, last = slice_rows(lines, rounds, round_)
        stop = min(last * _ALIGN, segments.total)
        for segment, low, high, position in _pieces(segments.nbytes, segments.itemsizes, first * _ALIGN, stop):
            slot = arena.view(kernels[segment], offset + position, dtypes[segment], (high - low,))
            copies[segment](slot, inputs[segment][low:high])

    def reduce(round_: int, offset: int) -> None:
        pieces, base = part(round_, me)
        for segment, low, high, position in pieces:
            at, shape = offset + base + position, (high - low,)
            sources = [
                inputs[segment][low:high]
                if i == me
                else arenas[rank].view(kernels[segment], at, dtypes[segment], shape)
                for i, rank in enumerate(members)
            ]
            reducers[segment](arena.view(kernels[segment], at, dtypes[segment], shape), sources)

    def collect(round_: int, offset: int) -> None:
        for owner, rank in enumerate(members):
            pieces, base = part(round_, owner)
            for segment, low, high, position in pieces:
                view = arenas[rank].view(kernels[segment], offset + base + position, dtypes[segment], (high - low,))
                copies[segment](outputs[segment][low:high], view)

    staging.exchange(sequence, members, rounds, fill, reduce, collect)


def reducescatter(staging: Staging, sequence: int, entry: Entry, work: Work) -> None:
    """Reduce, and leave each rank its own rows."""
    response, library = entry.response, kernels_named(work.kernels)
    request, members = response.requests[0], response.members
    parts = len(members)
    part_bytes = CHUNK_BYTES // parts // _ALIGN * _ALIGN
    rounds: list[tuple[int, int]] = []
    inputs, outputs, bounds, reducers = [], [], [], []
    for index, spec in enumerate(request.tensors):
        row = spec.count // spec.shape[0] if spec.shape[0] else 0
        bounds.append([tuple(row * r for r in slice_rows(spec.shape[0], parts, i)) for i in range(parts)])
        low, high = slice_rows(spec.shape[0], parts, entry.me)
        inputs.append(work.inputs[index].reshape(-1))
        outputs.append(work.allocate(index, (high - low, *spec.shape[1:])).reshape(-1))
        reducers.append(library.reducer(spec.dtype, request.op, request.prescale, request.postscale, response.divisor))
        step = part_bytes // ITEMSIZE[spec.dtype]
        longest = max(stop - start for start, stop in bounds[index])
        rounds += [(index, start) for start in range(0, longest, step)]

    def span(index: int, start: int, owner: int) -> tuple[int, int]:
        low, high = bounds[index][owner]
        step = part_bytes // ITEMSIZE[request.tensors[index].dtype]
        return min(low + start, high), min(low + start + step, high)

    def fill(round_: int, offset: int) -> None:
        index, start = rounds[round_]
        for owner in range(parts):
            low, high = span(index, start, owner)
            if owner != entry.me and low < high:
                slot = staging.arena.view(
                    work.kernels, offset + owner * part_bytes, request.tensors[index].dtype, (high - low,)
                )
                library.copy(slot, inputs[index][low:high])

    def drain(round_: int, offset: int) -> None:
        index, start = rounds[round_]
        low, high = span(index, start, entry.me)
        if low >= high:
            return
        at = offset + entry.me * part_bytes
        sources: list[Any] = [
            inputs[index][low:high]
            if i == entry.me
            else staging.arenas[rank].view(work.kernels, at, request.tensors[index].dtype, (high - low,))
            for i, rank in enumerate(members)
        ]
        base = bounds[index][entry.me][0]
        reducers[index](outputs[index][low - base : high - base], sources)

    staging.rounds(sequence, members, len(rounds), fill, drain)
