"""Reducescatter of ranks on several hosts, in rounds that bring every rank an equal share of its rows.

In a round the members' rows lie one after the other, grouped by host; each owner has a slice of the rows of all
members. It reduces this slice over its host, sends every host the rows of its members, and reduces the rows that it
receives.
"""

from __future__ import annotations

from horovod.core.requests import ITEMSIZE
from horovod.splits import part_of
from horovod.transports.base import Entry, Work
from horovod.transports.groups import Pending
from horovod.transports.hierarchical.stage import CHUNK_BYTES
from horovod.transports.hierarchical.streams import check_range, dtype_between, steps_of
from horovod.transports.hierarchical.team import Team
from horovod.transports.libraries import kernels_named
from horovod.transports.pieces import LINE

__all__ = ["reducescatter"]

#: Scratch memory of a round.
_PARTIAL, _RECEIVED, _ROUND_BYTES = 0, CHUNK_BYTES, 2 * CHUNK_BYTES


def reducescatter(team: Team, entry: Entry, work: Work) -> None:
    """Reduce, and leave each rank its own rows."""
    for index in range(len(entry.response.requests[0].tensors)):
        _Tensor(team, entry, work, index).run()


class _Tensor:
    """One rank's part of reducing one tensor."""

    def __init__(self, team: Team, entry: Entry, work: Work, index: int) -> None:
        response = entry.response
        spec, members = response.requests[0].tensors[index], response.members
        request = response.requests[0]
        self._team, self._dtype, self._kernels = team, dtype_between(spec.dtype, request), work.kernels
        self._library, self._itemsize = kernels_named(work.kernels), ITEMSIZE[self._dtype]
        self._steps = steps_of(self._library, self._dtype, request, response.divisor, team.hosts, team.here)
        row = spec.count // spec.shape[0] if spec.shape[0] else 0
        parts = [part_of(spec.shape[0], len(members), i) for i in range(len(members))]
        of_rank = {rank: (row * low, row * high) for rank, (low, high) in zip(members, parts, strict=True)}
        self._order = [rank for host in team.hosts for rank in host]
        self._bounds = [of_rank[rank] for rank in self._order]
        self._source = work.inputs[index].reshape(-1)
        check_range(self._library, spec, self._source, request, response.divisor)
        low, high = parts[entry.me]
        self._target = work.allocate(index, (high - low, *spec.shape[1:])).reshape(-1)
        longest = max(high - low for low, high in self._bounds)
        # Elements of one member's rows in one slice of a round.
        widest = max(len(members), len(team.hosts) * max(map(len, team.hosts)))
        most = CHUNK_BYTES // widest // team.slots // LINE * LINE // self._itemsize
        lines = -(-longest * self._itemsize // team.slots // LINE) + 1
        self._each = max(LINE // self._itemsize, min(most, lines * LINE // self._itemsize))
        self._count = -(-longest // (self._each * team.slots))
        self._moving: dict[int, Pending] = {}

    def run(self) -> None:
        """Reduce the tensor."""
        self._team.pipeline(self._count, self._fill, self._send, self._reduce, self._collect)

    def _range(self, k: int, slot: int, place: int) -> tuple[int, int]:
        """Return the range of the tensor's elements that are one member's rows in a slice of a round."""
        low, high = self._bounds[place]
        start = low + (k * self._team.slots + slot) * self._each
        return min(start, high), min(start + self._each, high)

    def _position(self, slot: int, place: int) -> int:
        """Return the byte of the buffer at which these elements lie."""
        return (slot * len(self._order) + place) * self._each * self._itemsize

    def _fill(self, k: int) -> None:
        stage = self._team.stage
        for slot in range(self._team.slots):
            for place in range(len(self._order)):
                low, high = self._range(k, slot, place)
                if low < high:
                    view = stage.view(stage.me, k, self._position(slot, place), self._kernels, self._dtype, high - low)
                    self._library.copy(view, self._source[low:high])

    def _send(self, k: int) -> None:
        team, stage = self._team, self._team.stage
        count = len(self._order) * self._each
        start, nbytes, at = self._position(team.me, 0), count * self._itemsize, k % 2 * _ROUND_BYTES
        if len(team.local) == 1 and self._steps.is_plain:
            partial = stage.raw(stage.me, k, start, start + nbytes)
        else:
            sources = [stage.view(i, k, start, self._kernels, self._dtype, count) for i in range(len(team.local))]
            self._steps.inside(team.scratch.view(self._kernels, at + _PARTIAL, self._dtype, count), sources)
            partial = team.scratch.raw(at + _PARTIAL, at + _PARTIAL + nbytes)
        each = self._each * self._itemsize
        mine, hosts = len(team.local) * each, len(team.hosts)
        received = team.scratch.raw(at + _RECEIVED, at + _RECEIVED + hosts * mine)
        counts = [len(host) * each for host in team.hosts]
        self._moving[k] = team.owners().exchange(partial, counts, received, [mine] * hosts)

    def _reduce(self, k: int) -> None:
        team, stage = self._team, self._team.stage
        self._moving.pop(k).wait()
        count = len(team.local) * self._each
        at = k % 2 * _ROUND_BYTES + _RECEIVED
        sources = [
            team.scratch.view(self._kernels, at + i * count * self._itemsize, self._dtype, count)
            for i in range(len(team.hosts))
        ]
        target = stage.view(stage.me, k, self._position(team.me, 0), self._kernels, self._dtype, count)
        self._steps.between(target, sources)

    def _collect(self, k: int) -> None:
        team, stage = self._team, self._team.stage
        first = sum(map(len, team.hosts[: team.here]))
        place = first + team.me
        base = self._bounds[place][0]
        for slot in range(team.slots):
            low, high = self._range(k, slot, place)
            if low < high:
                at = self._position(slot, 0) + team.me * self._each * self._itemsize
                shown = stage.view(slot, k, at, self._kernels, self._dtype, high - low)
                self._library.copy(self._target[low - base : high - base], shown)
