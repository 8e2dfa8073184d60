"""Collectives of several hosts without owners: alltoall, where each part has one receiver, and Adasum."""

from __future__ import annotations

import math

import numpy as np

from horovod.core.adasum import coefficients
from horovod.core.requests import ITEMSIZE
from horovod.transports.base import Entry, Work
from horovod.transports.groups import Bytes, Group
from horovod.transports.hierarchical.team import Team
from horovod.transports.kernels import Buffer
from horovod.transports.libraries import kernels_named

__all__ = ["adasum", "alltoall"]

#: Bytes of one member's tensor that pass at once.
_ADASUM_BYTES = 1 << 20


def alltoall(team: Team, entry: Entry, work: Work) -> None:
    """Send the i-th split of this rank's rows to the i-th member."""
    library, matrix = kernels_named(work.kernels), entry.splits
    spec = entry.response.request_of(entry.me).tensors[0]
    row = ITEMSIZE[spec.dtype] * math.prod(spec.shape[1:])
    received = [splits[entry.me] for splits in matrix]
    output = work.allocate(0, (sum(received), *spec.shape[1:]))
    sent, taken = [rows * row for rows in matrix[entry.me]], [rows * row for rows in received]
    if any(map(any, matrix)) and row:
        send, receive = library.raw(work.inputs[0]), library.raw(output)
        team.everybody().exchange(send[: sum(sent)], sent, receive, taken).wait()


def adasum(team: Team, entry: Entry, work: Work) -> None:
    """Combine each tensor by itself: all ranks see all tensors, and compute the same."""
    for index, spec in enumerate(entry.response.requests[0].tensors):
        target = work.allocate(index, spec.shape).reshape(-1)
        if spec.count:
            _combine(team.everybody(), entry, work, index, target)


def _combine(group: Group, entry: Entry, work: Work, index: int, target: Buffer) -> None:
    """Write the Adasum of one tensor: a pass for the inner products, and one for the sum."""
    request, library, size = entry.response.requests[0], kernels_named(work.kernels), len(group.ranks)
    spec, source = request.tensors[index], library.raw(work.inputs[index])
    itemsize = ITEMSIZE[spec.dtype]
    step = _ADASUM_BYTES // itemsize

    def gather(start: int) -> list[Buffer]:
        part = source[start * itemsize : (start + step) * itemsize]
        nbytes = len(part)
        received: Bytes = np.empty(size * nbytes, np.uint8)
        group.gather(part, received, [nbytes] * size).wait()
        return [library.view(received, i * nbytes, spec.dtype, (nbytes // itemsize,)) for i in range(size)]

    gram = np.zeros((size, size))
    starts = range(0, spec.count, step)
    for start in starts:
        sources = gather(start)
        gram += library.gram(sources)
    # The factors commute with Adasum: it is homogeneous of degree one.
    factor = request.prescale * request.postscale
    weights = [weight * factor for weight in coefficients(gram.tolist())]
    for start in starts:
        if len(starts) > 1:
            sources = gather(start)
        library.combine(target[start : start + step], sources, weights)
