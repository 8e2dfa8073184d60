"""Small operations of ranks that are alone on their hosts: the data travels with the requests, over the control wire.

When the log contains an operation, the data of all members has arrived, and each member computes the result. So an
operation takes one round trip to rank 0. Rank 0's host passes the data on to all other hosts, hence the limits.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

from horovod.core.collectives import COLLECTIVES, is_reduction, result_shapes
from horovod.core.requests import NO_NOTE, Kind, ReduceOp, Request
from horovod.transports.base import Entry, Work, rows_taken
from horovod.transports.kernels import Buffer
from horovod.transports.libraries import kernels_named
from horovod.transports.pieces import aligned

__all__ = ["Mailbox", "is_small"]

#: Bytes that rank 0's host may send for one operation, and the most hosts among which it passes data on.
_MOST_SENT, _MOST_HOSTS = 128 << 10, 8
#: Maximum submissions of this rank that wait with their data: more at once are better executed together. Another rank
#: that lags behind may hold twice as many.
_MOST_WAITING = 4
_MOST_KEPT = 1024
_KINDS = frozenset({Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER})


def is_small(request: Request, size: int) -> bool:
    """Return whether the data of a request travels with it.

    Only a request of all ranks, each on a host of its own, qualifies: only then it is known how many may wait.
    """
    if request.process_set or request.kind not in _KINDS or request.op is ReduceOp.ADASUM or request.device != "cpu":
        return False
    nbytes = sum(aligned(spec.nbytes) for spec in request.tensors)
    return 2 <= size <= _MOST_HOSTS and nbytes <= _MOST_SENT // (size * (size - 1))


class Mailbox:
    """Data of submissions, by rank and note."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._data: list[OrderedDict[int, bytearray]] = [OrderedDict() for _ in range(size)]
        self._notes = itertools.count()

    def offer(self, work: Work, request: Request) -> int:
        """Copy the inputs of a submission; return the note under which its data is found, or ``NO_NOTE``."""
        own = self._data[self._rank]
        if len(own) >= _MOST_WAITING:
            return NO_NOTE
        raw, data = kernels_named(work.kernels).raw, bytearray()
        if request.root == self._rank or not COLLECTIVES[request.kind].root_sends:
            for spec, source in zip(request.tensors, work.inputs, strict=True):
                if spec.nbytes:
                    data += raw(source).data
                    data += bytes(aligned(spec.nbytes) - spec.nbytes)
        work.slot = note = next(self._notes) % NO_NOTE
        own[note] = data
        return note

    def put(self, rank: int, note: int, data: bytearray) -> None:
        """Keep the data that another rank has sent."""
        kept = self._data[rank]
        kept[note] = data
        if len(kept) > _MOST_KEPT:
            kept.popitem(last=False)  # its operation was executed without it, or has ended in an error

    def data(self, rank: int, note: int) -> bytearray:
        """Return the data of a submission."""
        return self._data[rank][note]

    def drop(self, work: Work) -> None:
        """Forget the data of a submission of this rank that is executed without it, or not at all."""
        if work.slot is not None:
            self._data[self._rank].pop(work.slot, None)

    def run(self, entry: Entry, work: Work, notes: Sequence[int]) -> None:
        """Execute an operation of which all members have sent their data."""
        response, library = entry.response, kernels_named(work.kernels)
        data = [self._data[rank].pop(note) for rank, note in zip(response.members, notes, strict=True)]
        starts = [0] * len(data)
        for index in range(len(response.requests[0].tensors)):
            sources = []
            for member, memory in enumerate(data):
                spec = response.request_of(member).tensors[index]
                # A rank that had nothing to send has no data.
                shape = spec.shape if memory or not spec.nbytes else (0,)
                sources.append(library.view(memory, starts[member], spec.dtype, shape))
                starts[member] += aligned(spec.nbytes)
            _execute(entry, work, index, sources)


def _execute(entry: Entry, work: Work, index: int, sources: list[Buffer]) -> None:
    """Compute this rank's result from one tensor of every member."""
    response, library, me = entry.response, kernels_named(work.kernels), entry.me
    request = response.requests[0]
    spec, kind = request.tensors[index], request.kind
    if taken := rows_taken(entry):
        sources = [source[rows] for source, rows in zip(sources, taken[index], strict=True)]
    target = work.allocate(index, result_shapes(response, me)[index])
    if kind is Kind.BROADCAST:
        library.copy(target, sources[response.members.index(request.root)])
        return
    if is_reduction(kind):
        reduce = library.reducer(spec.dtype, request.op, request.prescale, request.postscale, response.divisor)
        reduce(target, sources)
        return
    row = 0
    for source in sources:
        library.copy(target[row : row + source.shape[0]], source)
        row += source.shape[0]
