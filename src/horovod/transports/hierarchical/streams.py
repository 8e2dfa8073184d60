"""What a batch of allreduces consists of: tensors of one dtype laid end to end, and how they are reduced in two steps.

First each host reduces what its own ranks have, then the hosts reduce that. What a whole reduction does to its inputs
and to its result is split between the steps so that nothing is rounded, or overflows, that would not have on one host;
only 16-bit floats are rounded once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horovod.core.requests import ITEMSIZE, ReduceOp, Request
from horovod.transports.base import Entry, Work
from horovod.transports.kernels import Buffer, Kernels, Reducer
from horovod.transports.libraries import kernels_named
from horovod.transports.pieces import Piece, aligned, pieces_of

__all__ = ["Steps", "Stream", "steps_of", "streams_of"]


class Steps(NamedTuple):
    """The two steps of a reduction.

    Attributes:
        inside: of what the ranks of a host have.
        between: of what the hosts have.
        is_plain: whether the first changes nothing where a host has one rank.
    """

    inside: Reducer
    between: Reducer
    is_plain: bool


def steps_of(library: Kernels, dtype: str, request: Request, divisor: int, one_each: bool) -> Steps:
    """Return how tensors of a request are reduced.

    Args:
        library: the kernels.
        dtype: of the tensors.
        request: says how.
        divisor: what an average divides by.
        one_each: whether each host has one rank, so that the first step is none.
    """
    op, before, after = request.op, request.prescale, request.postscale
    inside = ReduceOp.SUM if op is ReduceOp.AVERAGE else op
    if dtype == "float16" and inside is ReduceOp.SUM and not one_each:
        factor = before * after / (divisor if op is ReduceOp.AVERAGE else 1)
        # The sum of one host may be beyond the range of this dtype where the result is not.
        if factor < 1.0:
            return Steps(
                library.reducer(dtype, inside, factor, 1.0, 1), library.reducer(dtype, inside, 1.0, 1.0, 1), False
            )
    return Steps(
        library.reducer(dtype, inside, before, 1.0, 1), library.reducer(dtype, op, 1.0, after, divisor), before == 1.0
    )


class Stream:
    """Tensors of one dtype, laid end to end.

    Args:
        dtype: theirs.
        steps: how they are reduced.
        kernels: name of the kernels that reduce them.

    Attributes:
        total: bytes of the whole; what follows a tensor up to the end of its cache line is part of it only where
            another tensor follows.
    """

    def __init__(self, dtype: str, steps: Steps, kernels: str) -> None:
        self.dtype, self.steps, self.kernels = dtype, steps, kernels
        self.itemsize = ITEMSIZE[dtype]
        self.total = 0
        self.inputs: list[Buffer] = []
        self.outputs: list[Buffer] = []
        self.libraries: list[Kernels] = []
        self._nbytes: list[int] = []

    def add(self, library: Kernels, source: Buffer, target: Buffer, nbytes: int) -> None:
        """Append a tensor."""
        self.inputs.append(source)
        self.outputs.append(target)
        self.libraries.append(library)
        self._nbytes.append(nbytes)
        self.total = aligned(self.total) + nbytes

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Return what of the tensors lies in bytes ``start`` to ``stop``."""
        return pieces_of(self._nbytes, [self.itemsize] * len(self._nbytes), start, stop)


def streams_of(batch: Sequence[tuple[Entry, Work]], one_each: bool) -> list[Stream]:
    """Return the tensors of a batch, one stream for each dtype, in the same order on all ranks.

    Args:
        batch: entries that are reduced alike, and this rank's side of them.
        one_each: whether each host has one rank.
    """
    streams: dict[str, Stream] = {}
    for entry, work in batch:
        library, request = kernels_named(work.kernels), entry.response.requests[0]
        for index, spec in enumerate(request.tensors):
            stream = streams.get(spec.dtype)
            if stream is None:
                steps = steps_of(library, spec.dtype, request, entry.response.divisor, one_each)
                stream = streams[spec.dtype] = Stream(spec.dtype, steps, library.name)
            source, target = work.inputs[index], work.allocate(index, spec.shape)
            flat = source.reshape(-1)
            stream.add(library, flat, flat if target is source else target.reshape(-1), spec.nbytes)
    return list(streams.values())
