"""Collectives of several hosts without owners: alltoall, where each part has one receiver, and Adasum."""

from __future__ import annotations

import numpy as np

from horovod.core.adasum import coefficients
from horovod.core.requests import ITEMSIZE, TensorSpec
from horovod.transports.base import Entry, Work
from horovod.transports.groups import Bytes
from horovod.transports.hierarchical.team import Team
from horovod.transports.kernels import Buffer
from horovod.transports.libraries import kernels_named

__all__ = ["adasum", "alltoall"]

#: Bytes of one member's tensor that pass at once.
_ADASUM_BYTES = 1 << 20


def alltoall(team: Team, entry: Entry, work: Work) -> None:
    """Send the i-th split of this rank's rows to the i-th member."""
    response, library = entry.response, kernels_named(work.kernels)
    spec, matrix = response.request_of(entry.me).tensors[0], entry.splits
    row = ITEMSIZE[spec.dtype]
    for dim in spec.shape[1:]:
        row *= dim
    received = [splits[entry.me] for splits in matrix]
    output = work.allocate(0, (sum(received), *spec.shape[1:]))
    sent, taken = [rows * row for rows in matrix[entry.me]], [rows * row for rows in received]
    if any(rows for splits in matrix for rows in splits) and row:
        send, receive = library.raw(work.inputs[0]), library.raw(output)
        team.everybody().exchange(send[: sum(sent)], sent, receive, taken).wait()


def adasum(team: Team, entry: Entry, work: Work) -> None:
    """Combine each tensor by itself: all ranks see all tensors, and compute the same."""
    request = entry.response.requests[0]
    for index, spec in enumerate(request.tensors):
        output = work.allocate(index, spec.shape)
        if spec.count:
            factor = request.prescale * request.postscale
            _Combination(team, work.kernels, spec, work.inputs[index], output).run(factor)


class _Combination:
    """Adasum of one tensor: a pass for the inner products, and one for the sum."""

    def __init__(self, team: Team, kernels: str, spec: TensorSpec, source: Buffer, target: Buffer) -> None:
        self._group, self._kernels, self._spec = team.everybody(), kernels, spec
        self._library = kernels_named(kernels)
        self._source = self._library.raw(source)
        self._target = target.reshape(-1)
        self._itemsize = ITEMSIZE[spec.dtype]
        self._step = _ADASUM_BYTES // self._itemsize

    def run(self, factor: float) -> None:
        """Write the result; ``factor`` commutes with Adasum, which is homogeneous of degree one."""
        size = len(self._group.ranks)
        gram = np.zeros((size, size))
        starts = range(0, self._spec.count, self._step)
        known: list[list[Buffer]] = []
        for start in starts:
            sources = self._gather(start)
            gram += self._library.gram(sources)
            if len(starts) == 1:
                known.append(sources)
        weights = [weight * factor for weight in coefficients(gram.tolist())]
        for start in starts:
            sources = known[0] if known else self._gather(start)
            stop = min(start + self._step, self._spec.count)
            self._library.combine(self._target[start:stop], sources, weights)

    def _gather(self, start: int) -> list[Buffer]:
        size, stop = len(self._group.ranks), min(start + self._step, self._spec.count)
        nbytes = (stop - start) * self._itemsize
        received: Bytes = np.empty(size * nbytes, np.uint8)
        part = self._source[start * self._itemsize : stop * self._itemsize]
        self._group.gather(part, received, [nbytes] * size).wait()
        count = stop - start
        return [self._library.view(received, i * nbytes, self._spec.dtype, (count,)) for i in range(size)]
