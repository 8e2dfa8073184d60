"""Inline messages: small data is sent with the request, so all of it is there when the entry is in the log."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from horovod.core.collectives import COLLECTIVES, is_reduction
from horovod.core.requests import Kind
from horovod.transports.base import Entry, Work, rows_taken
from horovod.transports.kernels import Buffer, Maker, Reducer
from horovod.transports.libraries import kernels_named
from horovod.transports.pieces import aligned
from horovod.transports.shm.clearing import LEAST_BYTES
from horovod.transports.shm.slots import factor_on_send, left_to_reduce, most_views
from horovod.transports.shm.staging import Staging

__all__ = ["ROUTINES", "Plan"]

#: Kept combinations of places and their views; ranks that run in step have few.
_MOST_ROWS = 64


class _Reduction(NamedTuple):
    """How one tensor is reduced."""

    reduce: Reducer  # reduces into a given tensor
    own: int  # index of the source for which this rank's own tensor replaces the copy that it has sent; -1 if none
    make: Maker | None  # reduces into a new tensor; None if `reduce` must write to an empty one


class Plan:
    """Executes an entry whose data was sent along; keeps the data that stays the same each time.

    Args:
        staging: every rank's arena, the limit of kept views, and the overwriting of read data.
        entry: the entry.
        kernels: name of the kernels that understand this rank's buffers.

    Attributes:
        me: this rank's place among the members.
        run: executes the entry for a work; every member's data lies at its offset.
    """

    def __init__(self, staging: Staging, entry: Entry, kernels: str) -> None:
        self._arenas, self._budget, self._clearing = staging.arenas, staging.budget, staging.clearing
        self._entry, self.me = entry, entry.me
        self._kernels = kernels
        response = entry.response
        request, members = response.requests[0], response.members
        # Views of all members by their offsets, for the last few combinations.
        self._rows: dict[tuple[int, ...], list[list[Buffer]]] = {}
        # Indexed by tensor, member and offset.
        self._views: list[list[dict[int, Buffer]]] = [[{} for _ in members] for _ in request.tensors]
        library = kernels_named(kernels)
        self._copy = library.copy
        self._reductions: list[_Reduction] = []
        if is_reduction(request.kind):
            for spec in request.tensors:
                scaled = factor_on_send(request, spec, response.divisor) != 1.0
                how = left_to_reduce(request, spec, response.divisor)
                # Reading back the copy that this rank has sent doubles the time. In place, the result
                # may overwrite one of two inputs, not of more.
                apart = len(members) == 2 or request.kind is Kind.REDUCESCATTER
                own = entry.me if apart and not scaled else -1
                make = library.maker(spec.dtype, *how) if len(members) > 1 else None
                self._reductions.append(_Reduction(library.reducer(spec.dtype, *how), own, make))
        self._taken = rows_taken(entry)
        self.run: Callable[[Work, tuple[int, ...]], None] = functools.partial(ROUTINES[request.kind], self)
        # Each rank takes its own data from its inputs, so the other of two ranks may overwrite the copy.
        if len(members) == 2 and entry.most_bytes >= LEAST_BYTES:
            self._other = members[1 - self.me]
            if request.root == self._other or not COLLECTIVES[request.kind].root_sends:
                self._routine, self.run = self.run, self._run_and_clear

    def views(self, offsets: tuple[int, ...]) -> list[list[Buffer]]:
        """Return the data that this rank takes, by tensor and then by member, from where each member has put it."""
        return self._rows.get(offsets) or self._find(offsets)

    def _find(self, offsets: tuple[int, ...]) -> list[list[Buffer]]:
        try:
            rows = [[known[offset] for known, offset in zip(row, offsets, strict=True)] for row in self._views]
        except KeyError:
            return self._cut(self._learn(offsets))
        rows = self._cut(rows)
        if self._taken:
            self._budget.charge(self, len(offsets) * len(rows))
        if len(self._rows) >= _MOST_ROWS:
            self._rows.clear()
        self._rows[offsets] = rows
        return rows

    def _run_and_clear(self, work: Work, offsets: tuple[int, ...]) -> None:
        self._routine(work, offsets)
        if not self._clearing.helps(self._other):
            return
        clear = kernels_named(self._kernels).clear
        for index, row in enumerate(self.views(offsets)):
            # Of a tensor that was scaled as it was sent, the other rank reads its own copy, too.
            if not self._reductions or self._reductions[index].own >= 0:
                clear(row[1 - self.me])

    def _cut(self, rows: list[list[Buffer]]) -> list[list[Buffer]]:
        if not self._taken:
            return rows
        both = zip(rows, self._taken, strict=True)
        return [[src[part] for src, part in zip(srcs, parts, strict=True)] for srcs, parts in both]

    def _input(self, work: Work, index: int) -> Buffer:
        """Return the part of this rank's own tensor that it takes itself."""
        return work.inputs[index][self._taken[index][self._entry.me]] if self._taken else work.inputs[index]

    def forget(self) -> None:
        """Keep no views; see ``Budget``."""
        self._rows.clear()
        for row in self._views:
            for known in row:
                known.clear()

    def _reduce(self, work: Work, offsets: tuple[int, ...]) -> None:
        views = self.views(offsets)
        for index, (reduce, own, make) in enumerate(self._reductions):
            srcs = views[index]
            if own >= 0:
                # The kept list must not get this rank's own tensor.
                srcs = srcs.copy()
                srcs[own] = work.inputs[index]
            outputs = work.outputs
            if index < len(outputs):
                reduce(outputs[index], srcs)
            elif make is not None and work.lend is None:
                work.outputs = [*outputs, make(srcs)]
            else:
                reduce(work.allocate(index, tuple(srcs[0].shape)), srcs)

    def _broadcast(self, work: Work, offsets: tuple[int, ...]) -> None:
        views = self.views(offsets)
        root = self._entry.response.members.index(self._entry.response.requests[0].root)
        for index, srcs in enumerate(views):
            shown = srcs[root]
            out = work.allocate(index, tuple(shown.shape))
            if root != self._entry.me:
                self._copy(out, shown)
            elif out is not work.inputs[index]:
                self._copy(out, work.inputs[index])

    def _gather(self, work: Work, offsets: tuple[int, ...]) -> None:
        me = self._entry.me
        for index, kept in enumerate(self._rows.get(offsets) or self._find(offsets)):
            srcs = kept.copy()  # the kept list must not get this rank's own tensor
            srcs[me] = self._input(work, index)
            rows = [src.shape[0] for src in srcs]
            out = work.allocate(index, (sum(rows), *srcs[0].shape[1:]))
            start = 0
            for src, count in zip(srcs, rows, strict=True):
                if count:
                    self._copy(out[start : start + count], src)
                start += count

    def _scatter(self, work: Work, offsets: tuple[int, ...]) -> None:
        for index, kept in enumerate(self._rows.get(offsets) or self._find(offsets)):
            srcs = kept.copy()
            reduce, own, _ = self._reductions[index]
            if own >= 0:
                srcs[own] = self._input(work, index)
            out = work.allocate(index, tuple(srcs[0].shape))
            if len(out):
                reduce(out, srcs)

    def _nothing(self, work: Work, offsets: tuple[int, ...]) -> None:
        """Do nothing: all members have come, which is the purpose of a barrier."""

    def _learn(self, offsets: tuple[int, ...]) -> list[list[Buffer]]:
        response = self._entry.response
        self._budget.charge(self, len(offsets) * len(self._views))
        positions = list(offsets)
        views: list[list[Buffer]] = []
        for index, row in enumerate(self._views):
            views.append([])
            for i, rank in enumerate(response.members):
                spec = response.request_of(i).tensors[index]
                view = self._arenas[rank].view_once(self._kernels, positions[i], spec.dtype, spec.shape)
                positions[i] += aligned(spec.nbytes)
                if len(row[i]) >= most_views(spec.nbytes):
                    row[i].clear()
                row[i][offsets[i]] = view
                views[-1].append(view)
        return views


ROUTINES: dict[Kind, Callable[[Plan, Work, tuple[int, ...]], None]] = {
    Kind.ALLREDUCE: Plan._reduce,
    Kind.BROADCAST: Plan._broadcast,
    Kind.ALLGATHER: Plan._gather,
    Kind.ALLTOALL: Plan._gather,
    Kind.REDUCESCATTER: Plan._scatter,
    Kind.BARRIER: Plan._nothing,
}
"""How to execute an entry of each kind whose data was sent along; other kinds are never sent along."""
