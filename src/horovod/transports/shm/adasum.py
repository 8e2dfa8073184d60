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
    for index, spec in enumerate(entry.response.requests[0].tensors):
        output = work.allocate(index, spec.shape).reshape(-1)
        if spec.count:
            phase = _combine(staging, sequence, entry, work, index, output, phase)


def _combine(
    staging: Staging, sequence: int, entry: Entry, work: Work, index: int, output: Buffer, phase: int
) -> int:  # fmt: skip
    """Run both passes over a tensor, from a phase of the log entry on; return the next free one."""
    request, members, library = entry.response.requests[0], entry.response.members, kernels_named(work.kernels)
    spec, size, source = request.tensors[index], len(members), work.inputs[index].reshape(-1)
    step = CHUNK_BYTES // ITEMSIZE[spec.dtype]
    rounds = -(-spec.count // step)
    gram = [[0.0] * size for _ in range(size)]
    weights: list[float] = []

    def views(round_: int, offset: int) -> list[Buffer]:
        count = min(step, spec.count - round_ * step)
        return [staging.arenas[rank].view_once(work.kernels, offset, spec.dtype, (count,)) for rank in members]

    def fill(round_: int, offset: int) -> None:
        library.copy(views(round_, offset)[entry.me], source[round_ * step : (round_ + 1) * step])

    def measure(round_: int, offset: int) -> None:
        shown = views(round_, offset)
        low, high = part_of(len(shown[0]), size, entry.me)
        for row, more in zip(gram, library.gram([view[low:high] for view in shown]), strict=True):
            row[:] = [value + one for value, one in zip(row, more, strict=True)]

    def square(rank: int, offset: int) -> Any:
        return staging.arenas[rank].view("numpy", offset, "float64", (size, size))

    def show(round_: int, offset: int) -> None:
        square(staging.rank, offset)[...] = gram

    def weigh(round_: int, offset: int) -> None:
        total = sum(square(rank, offset) for rank in members)
        # The factors commute with Adasum: it is homogeneous of degree one.
        factor = request.prescale * request.postscale
        weights[:] = [weight * factor for weight in coefficients(total.tolist())]

    def combine(round_: int, offset: int) -> None:
        library.combine(output[round_ * step : (round_ + 1) * step], views(round_, offset), weights)

    phase = staging.rounds(sequence, members, rounds, fill, measure, phase)
    phase = staging.rounds(sequence, members, 1, show, weigh, phase)
    return staging.rounds(sequence, members, rounds, fill, combine, phase)
