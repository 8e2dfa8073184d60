"""Allreduce of ranks on several hosts, as a pipeline of rounds.

    fill      every rank shows its part of the tensors to the other ranks on its host, which see the arena anyway
    reduce    each owner reduces its slice over the ranks of its host, and sends the owners of the same slice on the
              other hosts their parts of it
    gather    each owner reduces its own part over the hosts, and sends the result to all of them
    publish   the slice is complete, and lies where the ranks of this host can read it, or in all their arenas
    collect   every rank takes the slices of all owners, unless it has them already

A rank that is alone on its host shows nothing: it works in its result, if that is one stretch of memory. Plain sums of
two such ranks are left to the engine. While one
round is reduced, the previous one moves between hosts, and the one before that comes back. Each host sends,
and receives, 2 (h - 1) / h of the bytes of one rank, the least possible. A small tensor is not cut: the first owner
sends all of it to all hosts, in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horovod.splits import part_of
from horovod.transports.groups import AddingGroup, Bytes, Pending
from horovod.transports.hierarchical.stage import CHUNK_BYTES, InPlace, Memory, Stage
from horovod.transports.hierarchical.streams import Stream
from horovod.transports.hierarchical.team import Team
from horovod.transports.kernels import Buffer
from horovod.transports.libraries import kernels_named
from horovod.transports.pieces import LINE

__all__ = ["SCRATCH_BYTES", "allreduce"]

#: Up to this size, for each other host, the number of transfers matters more than their bytes.
_WHOLE_BYTES = 256 << 10
#: Above these sizes, an engine adds up a tensor of two ranks, or each of several, faster than it exchanges their data.
_ADDED_BYTES, _EACH_ADDED_BYTES = 64 << 10, 512 << 10
#: Rounds that are between hosts at the same time, and the scratch memory of each, besides the stage's buffers.
_DEPTH = 3
_PARTIAL, _RECEIVED, _PART = 0, CHUNK_BYTES, 3 * CHUNK_BYTES
_ROUND_BYTES = 4 * CHUNK_BYTES
SCRATCH_BYTES = _DEPTH * _ROUND_BYTES
"""Bytes of scratch memory that a rank needs."""


class _Round(NamedTuple):
    """Bytes of the stream that a round moves, this owner's slice of them, and each host's part of the slice."""

    start: int
    stop: int
    low: int
    high: int
    parts: list[tuple[int, int]]


def allreduce(team: Team, stream: Stream, tensors: Sequence[Memory]) -> None:
    """Reduce a stream over all members; ``tensors`` are the places of its only tensor on each rank here, or none."""
    if team.is_pair_of_ranks and stream.steps.scale:
        is_large = min(stream.nbytes) > (_ADDED_BYTES if len(stream.inputs) == 1 else _EACH_ADDED_BYTES)
        if is_large and isinstance(group := team.owners(), AddingGroup):
            _add(group, stream)
            return
    rounds = _rounds(team, stream)
    pipeline = _Pipeline(team, stream, rounds, tensors)
    stage, count, base = team.stage, len(rounds), team.stage.part()
    if tensors:
        # No other rank uses an owner's slice until the owner writes it to all arenas; so they meet only at the end.
        for k in range(count + 2) if team.me < pipeline.slots else ():
            pipeline.advance(k)
        stage.post(base + 1)
        stage.wait(base + 1)
        return
    for k in range(count + _DEPTH):
        if k < count:
            pipeline.fill(k)
        stage.post(base + 2 * k + 1)
        if team.me < pipeline.slots:
            if k < count:
                stage.wait(base + 2 * k + 1)
            pipeline.advance(k)
        stage.post(base + 2 * k + 2)
        if k >= _DEPTH:
            stage.wait(base + 2 * k)
            pipeline.collect(k - _DEPTH)


def _add(group: AddingGroup, stream: Stream) -> None:
    """Let the engine add up the tensors of two ranks, in the memory of the results."""
    moving = []
    for library, source, target in zip(stream.libraries, stream.inputs, stream.outputs, strict=True):
        scale = stream.steps.scale
        if target is not source or scale != 1.0:
            library.copier(stream.dtype, scale)(target, source)
        moving.append(group.add(library.raw(target), stream.dtype))
    for pending in moving:
        pending.wait()


def _rounds(team: Team, stream: Stream) -> list[_Round]:
    """Cut a stream into rounds, the same on all hosts."""
    slots = 1 if _is_whole(team, stream) else team.slots
    rounds = []
    for start in range(0, stream.total, CHUNK_BYTES):
        stop = min(start + CHUNK_BYTES, stream.total)
        low, high = _slice(stop - start, slots, min(team.me, slots - 1))
        hosts = len(team.hosts)
        parts = [_slice(high - low, hosts, host) for host in range(hosts)]
        rounds.append(_Round(start, stop, low, high, parts))
    return rounds


def _is_whole(team: Team, stream: Stream) -> bool:
    hosts = len(team.hosts)
    if team.is_pair_of_ranks:
        # Each rank sends as much either way.
        return stream.total <= CHUNK_BYTES
    return stream.total <= min(_WHOLE_BYTES // (hosts - 1), CHUNK_BYTES // hosts)


def _slice(nbytes: int, slots: int, slot: int) -> tuple[int, int]:
    low, high = part_of(-(-nbytes // LINE), slots, slot)
    return min(low * LINE, nbytes), min(high * LINE, nbytes)


class _Pipeline:
    """One rank's part of every step; see the module."""

    def __init__(self, team: Team, stream: Stream, rounds: list[_Round], tensors: Sequence[Memory]) -> None:
        self._team, self._stream, self._rounds = team, stream, rounds
        starts = [one.start for one in rounds]
        self._places: InPlace | Stage = InPlace(tensors, starts) if tensors else team.stage
        self._whole = _is_whole(team, stream)
        self.slots = 1 if self._whole else team.slots
        self._moving: dict[int, Pending] = {}
        self._partial: dict[int, Buffer] = {}
        self._library = kernels_named(stream.kernels)
        self._results: dict[int, Buffer | None] = {}

    def _result(self, k: int) -> Buffer | None:
        """Return the memory of this rank's result for the slice, if the slice is made there."""
        if self._places.are_tensors or len(self._team.local) > 1:
            return None
        if k not in self._results:
            self._results[k] = self._slice_of(self._stream.outputs, k)
        return self._results[k]

    def _slice_of(self, tensors: Sequence[Buffer], k: int) -> Buffer | None:
        """Return the slice that this rank reduces, if it lies in one of its tensors as one stretch."""
        stream, (start, _, low, high, _) = self._stream, self._rounds[k]
        if self._team.me >= self.slots or stream.is_converted:
            return None
        pieces = stream.pieces(start + low, start + high)
        if len(pieces) != 1 or stream.libraries[pieces[0].segment] is not self._library:
            return None
        segment, first, last, _ = pieces[0]
        return tensors[segment][first:last] if (last - first) * stream.itemsize == high - low else None

    def _home(self, k: int, start: int, count: int) -> Buffer:
        """Return ``count`` elements from byte ``start`` of the slice on, in the memory where the slice is made."""
        result, size = self._result(k), self._stream.itemsize
        if result is not None:
            return result[start // size : start // size + count]
        stream, low = self._stream, self._rounds[k].low
        return self._places.view(self._team.stage.me, k, low + start, stream.kernels, stream.dtype, count)

    def _home_bytes(self, k: int, start: int, stop: int) -> Bytes:
        memory: Bytes = self._library.raw(self._home(k, start, (stop - start) // self._stream.itemsize))
        return memory

    def fill(self, k: int) -> None:
        stream, stage, (start, stop, low, high, _) = self._stream, self._team.stage, self._rounds[k]
        own = self._slice_of(stream.inputs, k)
        wanted = [(0, stop - start)] if own is None else [(0, low), (high, stop - start)]
        if len(self._team.local) == 1 and len(wanted) == 2:
            return
        for first, last in wanted:
            for segment, begin, end, position in stream.pieces(start + first, start + last):
                library = stream.libraries[segment]
                place = stage.view(stage.me, k, first + position, library.name, stream.dtype, end - begin)
                library.copy(place, stream.inputs[segment][begin:end])

    def advance(self, k: int) -> None:
        """Begin a round of this owner's slice, and take the rounds before it a step further."""
        count = len(self._rounds)
        if k < count:
            self._reduce(k)
        if 1 <= k <= count:
            self._gather(k - 1)
        if 2 <= k <= count + 1:
            self._publish(k - 2)

    def _reduce(self, k: int) -> None:
        team, stream, places = self._team, self._stream, self._places
        _, _, low, high, parts = self._rounds[k]
        if low == high:
            return
        count, kernels, me = (high - low) // stream.itemsize, stream.kernels, team.stage.me
        sources = [places.view(i, k, low, kernels, stream.dtype, count) for i in range(len(team.local))]
        result = self._result(k)
        partial = target = sources[me] if result is None else result
        if not places.are_tensors and (own := self._slice_of(stream.inputs, k)) is not None:
            sources[me] = own
        if len(sources) == 1 and stream.steps.is_plain:
            partial = sources[0]
        elif len(sources) <= 2 or sources[me] is not target:
            stream.steps.inside(target, sources)
        else:
            # With more than two sources, none may be written before all are read.
            partial = team.scratch.view(kernels, self._scratch(k, _PARTIAL), stream.dtype, count)
            stream.steps.inside(partial, sources)
        self._partial[k] = partial
        send, to, hosts = self._library.raw(partial), self._scratch(k, _RECEIVED), len(parts)
        if hosts == 2:
            # The part that stays here need not be copied.
            first, last = (0, high - low) if self._whole else parts[1 - team.here]
            mine = (high - low) if self._whole else parts[team.here][1] - parts[team.here][0]
            self._moving[k] = self._swap(send[first:last], team.scratch.raw(to, to + mine))
            return
        if self._whole:
            received = team.scratch.raw(to, to + hosts * (high - low))
            self._moving[k] = team.owners().gather(send, received, [high - low] * hosts)
            return
        mine = parts[team.here][1] - parts[team.here][0]
        received = team.scratch.raw(to, to + hosts * mine)
        self._moving[k] = team.owners().exchange(send, [b - a for a, b in parts], received, [mine] * hosts)

    def _swap(self, send: Bytes, received: Bytes) -> Pending:
        """Exchange with the other one of two hosts."""
        here = self._team.here
        sent, taken = [len(send), 0][:: 1 if here else -1], [len(received), 0][:: 1 if here else -1]
        return self._team.owners().exchange(send, sent, received, taken)

    def _gather(self, k: int) -> None:
        team, stream = self._team, self._stream
        _, _, low, high, parts = self._rounds[k]
        if low == high:
            return
        self._moving.pop(k).wait()
        partial = self._partial.pop(k)
        first, last = (0, high - low) if self._whole else parts[team.here]
        nbytes, at, to = last - first, self._scratch(k, _RECEIVED), self._scratch(k, _PART)
        count, kernels, dtype = nbytes // stream.itemsize, stream.kernels, stream.dtype
        is_pair = len(parts) == 2
        if count:
            if is_pair:
                sources = [partial[first // stream.itemsize : last // stream.itemsize]]
                sources.insert(1 - team.here, team.scratch.view(kernels, at, dtype, count))
            else:
                sources = [team.scratch.view(kernels, at + i * nbytes, dtype, count) for i in range(len(parts))]
            # The last reduction writes straight to the result.
            in_place = self._home(k, first, count) if self._whole or is_pair else None
            target = team.scratch.view(kernels, to, dtype, count) if in_place is None else in_place
            stream.steps.between(target, sources)
        if self._whole:
            return
        if is_pair:
            begin, end = parts[1 - team.here]
            self._moving[k] = self._swap(self._home_bytes(k, first, last), self._home_bytes(k, begin, end))
        else:
            self._moving[k] = team.owners().gather(
                team.scratch.raw(to, to + nbytes), self._home_bytes(k, 0, high - low), [b - a for a, b in parts]
            )

    def _publish(self, k: int) -> None:
        moving = self._moving.pop(k, None)
        if moving is not None:
            moving.wait()
        _, _, low, high, _ = self._rounds[k]
        if self._places.are_tensors and low < high:
            me, stream = self._team.stage.me, self._stream
            count = (high - low) // stream.itemsize
            shown = [
                self._places.view(i, k, low, stream.kernels, stream.dtype, count) for i in range(len(self._team.local))
            ]
            result = shown.pop(me)
            for view in shown:
                self._library.copy(view, result)

    def collect(self, k: int) -> None:
        stream, stage, (start, stop, *_) = self._stream, self._team.stage, self._rounds[k]
        if self._result(k) is not None:
            return
        for slot in range(self.slots):
            first, last = _slice(stop - start, self.slots, slot)
            for segment, low, high, position in stream.pieces(start + first, start + last):
                library = stream.libraries[segment]
                shown = stage.view(slot, k, first + position, library.name, stream.dtype, high - low)
                library.copy(stream.outputs[segment][low:high], shown)

    @staticmethod
    def _scratch(k: int, what: int) -> int:
        return k % _DEPTH * _ROUND_BYTES + what
