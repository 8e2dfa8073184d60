"""Small collectives whose data rode along in the request: when the entry is in the log, it is all there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod.core.requests import Kind
from horovod.transports.base import Entry, Work
from horovod.transports.kernels import Buffer
from horovod.transports.libraries import kernels_named
from horovod.transports.shm.arena import Arena
from horovod.transports.shm.reductions import slice_rows

__all__ = ["KINDS", "run", "slots"]

KINDS = frozenset({Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.REDUCESCATTER, Kind.BARRIER})
_ALIGN = 64


def slots(arena: Arena, work: Work, token: int) -> list[Buffer]:
    """Return views of the arena, from byte ``token`` on, in the shapes of a work's inputs."""
    places = []
    for source in work.inputs:
        dtype = str(source.dtype).rpartition(".")[2]
        places.append(arena.view(work.kernels, token, dtype, tuple(source.shape)))
        token += -(-source.nbytes // _ALIGN) * _ALIGN
    return places


def run(arenas: Sequence[Arena], entry: Entry, work: Work, tokens: tuple[int, ...]) -> None:
    """Execute an entry of which every member's data lies at its token."""
    plan = entry.inline_plan
    if plan is None:
        plan = entry.inline_plan = _Plan(arenas, entry, work.kernels)
    plan.run(work, tokens)


class _Plan:
    """What stays the same each time an entry is executed inline."""

    def __init__(self, arenas: Sequence[Arena], entry: Entry, kernels: str) -> None:
        self._arenas = arenas
        self._entry = entry
        self._kernels = kernels
        self._views: dict[tuple[int, ...], list[list[Any]]] = {}
        response = entry.response
        request = response.requests[0]
        library = kernels_named(kernels)
        self._copy = library.copy
        self._reducers = []
        if response.kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
            self._reducers = [
                library.reducer(spec.dtype, request.op, request.prescale, request.postscale, response.divisor)
                for spec in request.tensors
            ]

    def run(self, work: Work, tokens: tuple[int, ...]) -> None:
        views = self._views.get(tokens)
        if views is None:
            if len(self._views) > 64:
                self._views.clear()
            views = self._views[tokens] = self._resolve(tokens)
        response = self._entry.response
        kind = response.kind
        if kind is Kind.ALLREDUCE:
            for index, srcs in enumerate(views):
                outputs = work.outputs
                out = outputs[index] if index < len(outputs) else work.allocate(index, tuple(srcs[0].shape))
                self._reducers[index](out, srcs)
        elif kind is Kind.BROADCAST:
            root = response.members.index(response.requests[0].root)
            for index, srcs in enumerate(views):
                self._copy(work.allocate(index, tuple(srcs[root].shape)), srcs[root])
        elif kind is Kind.ALLGATHER:
            self._gather(work, views)
        elif kind is Kind.REDUCESCATTER:
            self._scatter(work, views)

    def _gather(self, work: Work, views: list[list[Any]]) -> None:
        for index, srcs in enumerate(views):
            rows = [src.shape[0] for src in srcs]
            out = work.allocate(index, (sum(rows), *srcs[0].shape[1:]))
            start = 0
            for src, count in zip(srcs, rows, strict=True):
                if count:
                    self._copy(out[start : start + count], src)
                start += count

    def _scatter(self, work: Work, views: list[list[Any]]) -> None:
        for index, srcs in enumerate(views):
            start, stop = slice_rows(srcs[0].shape[0], len(srcs), self._entry.me)
            out = work.allocate(index, (stop - start, *srcs[0].shape[1:]))
            if stop > start:
                self._reducers[index](out, [src[start:stop] for src in srcs])

    def _resolve(self, tokens: tuple[int, ...]) -> list[list[Any]]:
        response = self._entry.response
        positions = list(tokens)
        views = []
        for index in range(len(response.requests[0].tensors)):
            row = []
            for i, rank in enumerate(response.members):
                spec = response.request_of(i).tensors[index]
                row.append(self._arenas[rank].view(self._kernels, positions[i], spec.dtype, spec.shape))
                positions[i] += -(-spec.nbytes // _ALIGN) * _ALIGN
            views.append(row)
        return views
