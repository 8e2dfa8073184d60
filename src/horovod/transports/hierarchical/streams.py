"""The tensors of a batch of allreduces, laid end to end by dtype, and the two steps that reduce them.

First each host reduces the data of its own ranks, then the hosts reduce these results. Scaling and division are split
between the steps so that no value is rounded, or overflows, unless it would on one host; only 16-bit floats are
rounded once more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from horovod.core.requests import ITEMSIZE, ReduceOp, Request, TensorSpec
from horovod.errors import HorovodInternalError
from horovod.transports.base import Entry, Work
from horovod.transports.kernels import Buffer, Kernels, Reducer, scale_on_entry
from horovod.transports.libraries import kernels_named
from horovod.transports.pieces import Piece, aligned, pieces_of

__all__ = ["Steps", "Stream", "check_range", "dtype_between", "steps_of", "streams_of"]

#: Types whose averages are combined in a wider type.
_AVERAGED = frozenset({"float16", "bfloat16", "float32"})
#: Integers whose sum may be out of their range; the largest types travel as they are, and are checked.
_WIDENED = frozenset({"int8", "uint8", "int16", "uint16", "int32", "uint32"})
_CHECKED = frozenset({"int64", "uint64"})
#: Types that every engine adds up as our kernels do.
_ADDED = frozenset({"float32", "float64"})


def _needs_room(request: Request) -> bool:
    """Whether the sum of integers may be out of their range although the result is not."""
    return request.op is ReduceOp.AVERAGE or (request.op is ReduceOp.SUM and request.postscale != 1.0)


def dtype_between(dtype: str, request: Request) -> str:
    """Return the dtype of a tensor between hosts: sums that are divided or scaled afterwards need more room."""
    return "int64" if dtype in _WIDENED and _needs_room(request) else dtype


class Steps(NamedTuple):
    """The two steps of a reduction."""

    inside: Reducer  # reduces the data of a host's ranks
    between: Reducer  # reduces the results of the hosts
    is_plain: bool  # whether `inside` changes nothing on a host with one rank
    # factor for the data of ranks that are alone on their hosts which leaves a plain sum; 0 for none
    scale: float = 0.0


def steps_of(
    library: Kernels, dtype: str, request: Request, divisor: int, hosts: Sequence[Sequence[int]], here: int
) -> Steps:
    """Return the steps that reduce tensors of a request."""
    op, before, after = request.op, request.prescale, request.postscale
    counts = [len(host) for host in hosts]
    one_each = all(count == 1 for count in counts)
    uneven = [*counts, divisor] if dtype == "float16" else counts
    if op is ReduceOp.AVERAGE and dtype in _AVERAGED and any(count & (count - 1) for count in uneven):
        return _averages(library, dtype, request, divisor, counts, here)
    inner = ReduceOp.SUM if op is ReduceOp.AVERAGE else op
    if dtype == "float16" and inner is ReduceOp.SUM and not one_each:
        factor = before * after / (divisor if op is ReduceOp.AVERAGE else 1)
        # The sum of one host may be out of the range of this dtype although the result is not.
        if factor < 1.0:
            return Steps(
                library.reducer(dtype, inner, factor, 1.0, 1), library.reducer(dtype, inner, 1.0, 1.0, 1), False
            )
    scale = _scale(dtype, request, divisor) if one_each else 0.0
    return Steps(
        library.reducer(dtype, inner, before, 1.0, 1), library.reducer(dtype, op, 1.0, after, divisor), before == 1.0,
        scale,
    )  # fmt: skip


def _scale(dtype: str, request: Request, divisor: int) -> float:
    op, before, after = request.op, request.prescale, request.postscale
    if dtype not in _ADDED or op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        return 0.0
    if op is ReduceOp.SUM and before == after == 1.0:
        return 1.0
    factor = scale_on_entry(dtype, op, before, after, divisor)
    return factor if factor != 1.0 else 0.0


def _averages(library: Kernels, dtype: str, request: Request, divisor: int, counts: Sequence[int], here: int) -> Steps:
    """Return steps in which each host sends its average: a sum of three loses the bit that keeps tensors equal."""
    weights, scale = [count / divisor for count in counts], library.copier(dtype, request.postscale)

    def between(target: Buffer, sources: Sequence[Buffer]) -> None:
        library.combine(target, sources, weights)
        if request.postscale != 1.0:
            scale(target, target)

    inside = library.reducer(dtype, ReduceOp.AVERAGE, request.prescale, 1.0, counts[here])
    return Steps(inside, between, counts[here] == 1 and request.prescale == 1.0)


def check_range(library: Kernels, spec: TensorSpec, source: Buffer, request: Request, divisor: int) -> None:
    """Check that a sum of 64-bit integers which is divided or scaled afterwards cannot be out of range.

    Raises:
        HorovodInternalError: the sum could be out of range.
    """
    dtype = spec.dtype
    if dtype not in _CHECKED or not _needs_room(request) or not spec.count:
        return
    values = library.raw(source).view(dtype)
    limit = int(np.iinfo(dtype).max) // math.ceil(divisor * max(1.0, abs(request.prescale)))
    if int(values.max()) > limit or int(values.min()) < -limit:
        what = "an average" if request.op is ReduceOp.AVERAGE else "a sum with a postscale_factor"
        raise HorovodInternalError(
            f"{request.label}: {what} of {dtype} over {divisor} ranks on several hosts needs values "
            f"between -{limit} and {limit}, or their sum is out of range; received {values.min()} to {values.max()}. "
            "Reduce float64 instead"
        )


class Stream:
    """Tensors of one dtype, laid end to end. ``dtype`` is that between hosts; if ``is_converted``, they have another
    one.
    """

    def __init__(self, dtype: str, steps: Steps, kernels: str, is_converted: bool = False) -> None:
        self.dtype, self.steps, self.kernels, self.is_converted = dtype, steps, kernels, is_converted
        self.itemsize = ITEMSIZE[dtype]
        # bytes of the whole; the rest of a tensor's last cache line counts only if another tensor follows
        self.total = 0
        self.inputs: list[Buffer] = []
        self.outputs: list[Buffer] = []
        self.libraries: list[Kernels] = []
        self.nbytes: list[int] = []  # of each tensor

    def add(self, library: Kernels, source: Buffer, target: Buffer, count: int) -> None:
        """Append a tensor of ``count`` elements; copies convert it if it has another type."""
        nbytes = count * self.itemsize
        self.inputs.append(source)
        self.outputs.append(target)
        self.libraries.append(library)
        self.nbytes.append(nbytes)
        self.total = aligned(self.total) + nbytes

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Return the pieces of the tensors in bytes ``start`` to ``stop``."""
        return pieces_of(self.nbytes, [self.itemsize] * len(self.nbytes), start, stop)


def streams_of(batch: Sequence[tuple[Entry, Work]], hosts: Sequence[Sequence[int]], here: int) -> list[Stream]:
    """Return the tensors of a batch, whose entries are reduced alike, one stream for each dtype, in the same order on
    all ranks. ``here`` is the index of this host.
    """
    streams: dict[str, Stream] = {}
    for entry, work in batch:
        library, request = kernels_named(work.kernels), entry.response.requests[0]
        for index, spec in enumerate(request.tensors):
            stream = streams.get(spec.dtype)
            if stream is None:
                dtype = dtype_between(spec.dtype, request)
                steps = steps_of(library, dtype, request, entry.response.divisor, hosts, here)
                stream = streams[spec.dtype] = Stream(dtype, steps, library.name, dtype != spec.dtype)
            source, target = work.inputs[index], work.allocate(index, spec.shape)
            check_range(library, spec, source, request, entry.response.divisor)
            flat = source.reshape(-1)
            stream.add(library, flat, flat if target is source else target.reshape(-1), spec.count)
    return list(streams.values())
