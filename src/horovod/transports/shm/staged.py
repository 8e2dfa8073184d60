"""Allreduce of ordinary tensors, which pass in chunks through the staging buffers.

For two ranks it is cheapest that both read everything; for more, rank k reduces the k-th part of each chunk and the
others collect it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horovod.core.requests import ITEMSIZE
from horovod.splits import part_of
from horovod.transports.base import Entry, Work
from horovod.transports.kernels import Buffer, Kernels, Reducer
from horovod.transports.libraries import kernels_named
from horovod.transports.pieces import LINE, Piece, aligned, pieces_of
from horovod.transports.shm.arena import Arena
from horovod.transports.shm.staging import CHUNK_BYTES, Staging

__all__ = ["allreduce_staged"]

#: Up to this size, a few ranks rather read everything than synchronise twice per chunk.
_READ_ALL_BYTES = 256 << 10
#: Rounds whose views an entry remembers.
_KNOWN_ROUNDS = 256


class _Layout:
    """The tensors of one or several entries, laid end to end; entries may use different array libraries."""

    def __init__(self, batch: Sequence[tuple[Entry, Work]]) -> None:
        self.dtypes: list[str] = []
        self.reducers: list[Reducer] = []
        self.nbytes: list[int] = []
        self.libraries: list[Kernels] = []
        for entry, work in batch:
            library = kernels_named(work.kernels)
            request, divisor = entry.response.requests[0], entry.response.divisor
            for spec in request.tensors:
                self.dtypes.append(spec.dtype)
                self.nbytes.append(spec.nbytes)
                self.libraries.append(library)
                self.reducers.append(
                    library.reducer(spec.dtype, request.op, request.prescale, request.postscale, divisor)
                )
        self.itemsizes = [ITEMSIZE[dtype] for dtype in self.dtypes]
        self.total = sum(aligned(length) for length in self.nbytes)
        self.shared_pieces: dict[int, list[_SharedPiece]] = {}
        self.shares: dict[int, _Shares] = {}

    def view(self, arena: Arena, offset: int, segment: int, count: int) -> Buffer:
        return arena.view_once(self.libraries[segment].name, offset, self.dtypes[segment], (count,))

    def forget(self) -> None:
        """Keep no views; see ``Budget``."""
        self.shared_pieces.clear()
        self.shares.clear()

    def pieces(self, start: int, stop: int) -> list[Piece]:
        return pieces_of(self.nbytes, self.itemsizes, start, min(stop, self.total))


def allreduce_staged(
    staging: Staging, sequence: int, batch: Sequence[tuple[Entry, Work]], phase: int = 0
) -> None:  # fmt: skip
    """Reduce the ordinary tensors of one work, or of fused works; ``phase`` phases of the entry are over."""
    entry, _ = batch[0]
    # Fused works meet by chance, so only the layout of a single work, which may come again, is kept.
    layout = _Layout(batch) if len(batch) > 1 else entry.cache.get("staged", lambda: _Layout(batch))
    inputs, outputs = [], []
    for one, work in batch:
        for index, spec in enumerate(one.response.requests[0].tensors):
            source, target = work.inputs[index], work.allocate(index, spec.shape)
            inputs.append(source.reshape(-1))
            outputs.append(inputs[-1] if target is source else target.reshape(-1))
    members = entry.response.members
    if len(members) == 2 or (len(members) <= 4 and layout.total <= _READ_ALL_BYTES):
        _read_all(staging, sequence, entry, layout, inputs, outputs, phase)
    else:
        _by_owner(staging, sequence, members, entry.me, layout, inputs, outputs, phase)


class _SharedPiece(NamedTuple):
    """A piece, and its places in the staging buffers of all members, in their order."""

    segment: int
    low: int
    high: int
    sources: list[Buffer]


def _read_all(
    staging: Staging, sequence: int, entry: Entry, layout: _Layout, inputs: list[Buffer], outputs: list[Buffer],
    phase: int,
) -> None:  # fmt: skip
    """Let every rank reduce everything."""
    arenas, members, me, known = staging.arenas, entry.response.members, entry.me, layout.shared_pieces
    copies, reducers = [library.copy for library in layout.libraries], layout.reducers
    # With two inputs the result may overwrite either, so this rank's own need not be read back.
    pair = len(members) == 2

    def shared_pieces(round_: int, offset: int) -> list[_SharedPiece]:
        found = known.get(round_)
        if found is None:
            found = []
            for segment, low, high, position in layout.pieces(round_ * CHUNK_BYTES, (round_ + 1) * CHUNK_BYTES):
                views = [layout.view(arenas[rank], offset + position, segment, high - low) for rank in members]
                found.append(_SharedPiece(segment, low, high, views))
            if len(known) < _KNOWN_ROUNDS:
                staging.budget.charge(layout, len(found) * len(members))
                known[round_] = found
        return found

    def fill(round_: int, offset: int) -> None:
        for segment, low, high, places in shared_pieces(round_, offset):
            copies[segment](places[me], inputs[segment][low:high])

    def drain(round_: int, offset: int) -> None:
        for segment, low, high, sources in shared_pieces(round_, offset):
            target = outputs[segment][low:high]
            if not pair:
                reducers[segment](target, sources)
                continue
            shown = sources[1 - me]
            own = target if outputs[segment] is inputs[segment] else inputs[segment][low:high]
            reducers[segment](target, [shown, own] if me else [own, shown])
            staging.clearing.clear(members[1 - me], shown, layout.libraries[segment])

    staging.rounds(sequence, members, -(-layout.total // CHUNK_BYTES), fill, drain, phase)


class _Shares(NamedTuple):
    """The work of a rank in one round: pieces and their places in the staging buffers.

    It fills the buffers with data that other ranks reduce; when it reduces, its own source is its input.
    """

    fill: list[tuple[int, int, int, Buffer]]
    reduce: list[tuple[int, int, int, Buffer, list[Buffer]]]
    collect: list[tuple[int, int, int, Buffer]]


def _by_owner(
    staging: Staging, sequence: int, members: Sequence[int], me: int, layout: _Layout, inputs: list[Buffer],
    outputs: list[Buffer], phase: int,
) -> None:  # fmt: skip
    """Let rank k reduce the k-th part of each round, and the others collect it."""
    arenas, arena, known = staging.arenas, staging.arena, layout.shares
    copies, reducers = [library.copy for library in layout.libraries], layout.reducers
    lines = -(-layout.total // LINE)
    rounds = -(-layout.total // staging.exchange_bytes)

    def cut(round_: int, low: int, high: int, offset: int) -> list[tuple[int, int, int, int]]:
        """Return the pieces in lines ``low`` to ``high`` of a round, and where they lie in the buffer."""
        first, _ = part_of(lines, rounds, round_)
        pieces = layout.pieces((first + low) * LINE, (first + high) * LINE)
        return [(p.segment, p.low, p.high, offset + low * LINE + p.position) for p in pieces]

    def shares(round_: int, offset: int) -> _Shares:
        found = known.get(round_)
        if found is not None:
            return found
        first, last = part_of(lines, rounds, round_)
        parts = [part_of(last - first, len(members), owner) for owner in range(len(members))]
        found = _Shares([], [], [])
        for low, high in ((0, parts[me][0]), (parts[me][1], last - first)):
            for segment, start, stop, at in cut(round_, low, high, offset):
                found.fill.append((segment, start, stop, layout.view(arena, at, segment, stop - start)))
        for owner, (low, high) in enumerate(parts):
            for segment, start, stop, at in cut(round_, low, high, offset):
                if owner != me:
                    view = layout.view(arenas[members[owner]], at, segment, stop - start)
                else:
                    views = [layout.view(arenas[rank], at, segment, stop - start) for rank in members]
                    view = views[me]
                    found.reduce.append((segment, start, stop, view, views))
                found.collect.append((segment, start, stop, view))
        if len(known) < _KNOWN_ROUNDS:
            views_made = len(found.fill) + len(found.collect) + len(found.reduce) * len(members)
            staging.budget.charge(layout, views_made)
            known[round_] = found
        return found

    def fill(round_: int, offset: int) -> None:
        for segment, low, high, slot in shares(round_, offset).fill:
            copies[segment](slot, inputs[segment][low:high])

    def reduce(round_: int, offset: int) -> None:
        for segment, low, high, target, views in shares(round_, offset).reduce:
            sources = views.copy()
            sources[me] = inputs[segment][low:high]
            reducers[segment](target, sources)

    def collect(round_: int, offset: int) -> None:
        for segment, low, high, view in shares(round_, offset).collect:
            copies[segment](outputs[segment][low:high], view)

    staging.exchange(sequence, members, rounds, fill, reduce, collect, phase)
