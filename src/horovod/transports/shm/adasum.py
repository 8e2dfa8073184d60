"""Adasum over shared memory, in two passes: the inner products of all ranks' tensors, then their combination.

Each rank takes the inner products of its part of every chunk; the parts are summed in rank order, so all ranks
find the same coefficients, and all compute the same combination.
"""

from __future__ import annotations

from typing import Any

from horovod.core.adasum import coefficients
from horovod.core.requests import ITEMSIZE
from horovod.splits import part_of
from horovod.transports.base import Entry, Work
from horovod.transports.kernels import Buffer
from horovod.transports.libraries import kernels_named
from horovod.transports.shm.staging import CHUNK_BYTES, Staging

__all__ = ["allreduce_adasum"]


def allreduce_adasum(staging: Staging, sequence: int, entry: Entry, work: Work) -> None:
    """Combine each tensor by itself."""
    phase = 0
    for index in range(len(entry.response.requests[0].tensors)):
        phase = _Tensor(staging, sequence, entry, work, index).run(phase)


class _Tensor:
    """One tensor of the request."""

    def __init__(self, staging: Staging, sequence: int, entry: Entry, work: Work, index: int) -> None:
        request = entry.response.requests[0]
        spec = request.tensors[index]
        self._staging = staging
        self._sequence = sequence
        self._members = entry.response.members
        self._me = entry.me
        self._name = work.kernels
        self._library = kernels_named(work.kernels)
        self._dtype = spec.dtype
        self._count = spec.count
        self._step = CHUNK_BYTES // ITEMSIZE[spec.dtype]
        self._rounds = -(-spec.count // self._step)
        self._input = work.inputs[index].reshape(-1)
        self._output = work.allocate(index, spec.shape).reshape(-1)
        self._factor = request.prescale * request.postscale
        size = len(self._members)
        self._gram = [[0.0] * size for _ in range(size)]
        self._weights: list[float] = []

    def run(self, phase: int) -> int:
        """Run both passes, from a phase of the log entry on; return the next free one."""
        if not self._count:
            return phase
        staging, size = self._staging, len(self._members)
        phase = staging.rounds(self._sequence, self._members, self._rounds, self._fill, self._measure, phase)
        phase = staging.rounds(self._sequence, self._members, 1, self._show, self._sum, phase)
        # The factors commute with Adasum: it is homogeneous of degree one.
        self._weights = [weight * self._factor for weight in coefficients(self._gram)]
        assert len(self._weights) == size
        return staging.rounds(self._sequence, self._members, self._rounds, self._fill, self._combine, phase)

    def _bounds(self, round_: int) -> tuple[int, int]:
        return round_ * self._step, min((round_ + 1) * self._step, self._count)

    def _views(self, round_: int, offset: int) -> list[Buffer]:
        low, high = self._bounds(round_)
        arenas = self._staging.arenas
        return [arenas[rank].view_once(self._name, offset, self._dtype, (high - low,)) for rank in self._members]

    def _fill(self, round_: int, offset: int) -> None:
        low, high = self._bounds(round_)
        slot = self._staging.arena.view_once(self._name, offset, self._dtype, (high - low,))
        self._library.copy(slot, self._input[low:high])

    def _measure(self, round_: int, offset: int) -> None:
        views = self._views(round_, offset)
        low, high = part_of(views[0].shape[0], len(views), self._me)
        part = self._library.gram([view[low:high] for view in views])
        for i, row in enumerate(part):
            for j, value in enumerate(row):
                self._gram[i][j] += value

    def _square(self, rank: int, offset: int) -> Any:
        size = len(self._members)
        return self._staging.arenas[rank].view("numpy", offset, "float64", (size, size))

    def _show(self, round_: int, offset: int) -> None:
        self._square(self._staging.rank, offset)[...] = self._gram

    def _sum(self, round_: int, offset: int) -> None:
        total = sum(self._square(rank, offset) for rank in self._members)
        self._gram = total.tolist()

    def _combine(self, round_: int, offset: int) -> None:
        low, high = self._bounds(round_)
        self._library.combine(self._output[low:high], self._views(round_, offset), self._weights)
