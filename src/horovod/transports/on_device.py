"""Moves and reduces tensors of a GPU where they are, with NCCL; another transport moves all others.

The thread that executes an entry waits for the GPU, and checks the other ranks meanwhile. So a result is complete
when its operation is done, and no rank stays in a kernel that waits for a lost rank for ever. Dtypes that NCCL cannot
reduce travel through host memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from horovod.core.collectives import is_reduction
from horovod.core.requests import ITEMSIZE, Kind, ReduceOp, Request, Response
from horovod.errors import RequestError
from horovod.splits import part_of
from horovod.transports.base import Entry, Transport, Work, sum_class
from horovod.transports.kernels import divisor_and_factor
from horovod.transports.kernels_torch import as_bytes

if TYPE_CHECKING:
    from horovod.transports.nccl import NcclGroup, NcclGroups

__all__ = ["ROUTINES", "DeviceTransport", "execute"]

#: The dtypes that NCCL can sum; it can move all.
_ARITHMETIC = frozenset({"bool", "uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"})
_HALF = (torch.float16, torch.bfloat16)
#: For booleans, which are bytes of 0 and 1, sum and product are these reductions.
_OF_TRUTH = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}

_Batch = Sequence[tuple[Entry, Work]]

#: This process' streams, by device.
_streams: dict[torch.device, Any] = {}


class DeviceTransport(Transport):
    """See ``Transport``. ``inner`` moves tensors in host memory, ``groups`` those of the device."""

    def __init__(self, inner: Transport, groups: NcclGroups, device: str = "cuda") -> None:
        self._inner, self._groups, self._device = inner, groups, device
        self.name = f"{inner.name}, and {groups.name} on {device}"
        self.fresh = inner.fresh
        self._used = ""

    @property
    def is_awaited(self) -> bool:
        """Whether a thread of this rank waits for a result."""
        return self._inner.is_awaited

    @is_awaited.setter
    def is_awaited(self, value: bool) -> None:
        self._inner.is_awaited = value

    def takes(self, device: str, kind: Kind, op: ReduceOp, dtypes: Sequence[str]) -> bool:
        """Return whether tensors are moved where they are; the same on all ranks.

        Raises:
            RequestError: they are on another device than earlier tensors.
        """
        if not self._moves(device, kind, op, dtypes):
            return False
        if device != (self._used or device):
            raise RequestError(
                f"tensors of this rank were on {self._used} before, and this one is on {device}: {self._groups.name} "
                f"moves those of one GPU for each rank; use tensor.to({self._used!r})"
            )
        self._used = device
        return True

    def _moves(self, device: str, kind: Kind, op: ReduceOp, dtypes: Sequence[str]) -> bool:
        if device.partition(":")[0] != self._device:
            return False
        if is_reduction(kind) and (op is ReduceOp.ADASUM or not _ARITHMETIC.issuperset(dtypes)):
            return False
        return kind in ROUTINES

    def _takes(self, request: Request) -> bool:
        return self._moves(request.device, request.kind, request.op, [spec.dtype for spec in request.tensors])

    def allocate(self, nbytes: int) -> Any:
        return self._inner.allocate(nbytes)

    def place(self, addresses: Sequence[int]) -> tuple[int, ...]:
        return self._inner.place(addresses)

    def fuse_class(self, request: Request) -> str:
        if not self._takes(request):
            return self._inner.fuse_class(request)
        found = sum_class(request)
        return found and f"{self._device} {found}"

    def inline(self, kernels: str, request: Request, members: int) -> Any:
        return self._inner.inline(kernels, request, members)

    def offer(self, work: Work, inline: Any) -> int:
        return self._inner.offer(work, inline)

    def run(self, sequence: int, batch: Sequence[tuple[Entry, Work]], notes: tuple[int, ...]) -> int:
        entry, work = batch[0]
        response = entry.response
        if not response.requests or not self._takes(response.requests[0]):
            return self._inner.run(sequence, batch, notes)
        device = work.inputs[0].device
        execute(self._groups.group(response.members, device) if len(response.members) > 1 else None, batch)
        return 0

    def settled(self, members: Sequence[int], fence: int) -> bool:
        return self._inner.settled(members, fence)

    def skip(self, work: Work) -> None:
        self._inner.skip(work)

    def rest(self) -> None:
        self._inner.rest()

    def close(self) -> None:
        self._groups.close()
        self._inner.close()


def execute(group: NcclGroup | None, batch: Sequence[tuple[Entry, Work]]) -> None:
    """Execute an entry whose tensors are on a device; blocks until the results are there. One rank has no group."""
    entry, work = batch[0]
    with _on_stream(work.inputs[0].device) as stream:
        ROUTINES[entry.response.kind](group, batch)
        if group is not None:
            group.wait()
        elif stream is not None:
            stream.synchronize()


@contextlib.contextmanager
def _on_stream(device: torch.device) -> Iterator[Any]:
    """Use a stream that does not wait for the script's work, and yield it; None for a device without streams."""
    if device.type != "cuda":
        yield None
        return
    stream = _streams.get(device)
    if stream is None:
        stream = _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield stream


def _allreduce(group: NcclGroup | None, batch: _Batch) -> None:
    """Reduce the tensors of all works, which have the same arguments; tensors of one dtype at once."""
    outputs: dict[torch.dtype, list[torch.Tensor]] = {}
    for entry, work in batch:
        for index, spec in enumerate(entry.response.requests[0].tensors):
            output = work.allocate(index, spec.shape)
            if output is not work.inputs[index]:
                output.copy_(work.inputs[index])
            if spec.count:
                outputs.setdefault(output.dtype, []).append(output)
    for alike in outputs.values():
        _reduce(group, batch[0][0].response, alike)


def _reducescatter(group: NcclGroup | None, batch: _Batch) -> None:
    """Reduce, and keep this rank's rows."""
    entry, work = batch[0]
    response = entry.response
    for index, spec in enumerate(response.requests[0].tensors):
        members = len(response.members)
        start, stop = part_of(spec.shape[0], members, entry.me)
        output = work.allocate(index, (stop - start, *spec.shape[1:]))
        if not spec.count:
            continue
        # Scaling works in place, on a copy: the caller's tensor stays as it is.
        whole = work.inputs[index].clone()
        if group is not None and spec.shape[0] % members == 0:
            _reduce(group, response, [whole], output)
        else:
            _reduce(group, response, [whole])
            output.copy_(whole[start:stop])


def _reduce(
    group: NcclGroup | None, response: Response, tensors: list[torch.Tensor], part: torch.Tensor | None = None
) -> None:
    """Scale, reduce, and scale the result, in place; the tensors have one dtype, and none is empty. ``part`` receives
    this rank's equal part of the only tensor; None reduces whole tensors. One rank alone has no group.
    """
    request = response.requests[0]
    op, before, after, divisor = request.op, request.prescale, request.postscale, 1
    dtype = tensors[0].dtype
    if op is ReduceOp.AVERAGE and not dtype.is_floating_point and dtype is not torch.bool:
        for tensor in tensors:
            _average_integers(group, response, tensor, tensor if part is None else part)
        return
    if op is ReduceOp.AVERAGE:
        op, divisor = ReduceOp.SUM, response.divisor
    if op is ReduceOp.SUM and tensors[0].dtype in _HALF:
        # Scale first, so that the sum stays within the range of 16-bit floats.
        before, after, divisor = before * after / divisor, 1.0, 1
    for tensor in tensors:
        _scale(tensor, before, 1)
    if group is not None:
        if tensors[0].dtype is torch.bool:
            op = _OF_TRUTH.get(op, op)
        numbers = [_as_numbers(tensor) for tensor in tensors]
        if part is None:
            group.reduce(numbers, op)
        else:
            group.reduce_scatter(_as_numbers(part), numbers[0], op)
    for result in tensors if part is None else [part]:
        _scale(result, after, divisor)


def _average_integers(group: NcclGroup | None, response: Response, whole: torch.Tensor, result: torch.Tensor) -> None:
    """Write the average of integers, or this rank's part of it, to ``result``, truncated toward zero.

    Their sum may be out of range, so quotients and remainders are added apart. Scaled integers are added as float64.
    """
    request, divisor = response.requests[0], response.divisor
    is_scaled = request.prescale != 1.0 or request.postscale != 1.0
    if is_scaled:
        addends = [(whole.to(torch.float64) * request.prescale).trunc_()]
    else:
        quotient = whole.to(torch.int64).div(divisor, rounding_mode="floor")
        addends = [quotient, whole.to(torch.int64) - quotient * divisor]
    sums = []
    for addend in addends:
        total = addend if result is whole else addend.new_empty(result.shape)
        if group is not None and result is whole:
            group.reduce([addend.view(-1)], ReduceOp.SUM)
        elif group is not None:
            group.reduce_scatter(total.view(-1), addend.view(-1), ReduceOp.SUM)
        sums.append(total)
    if is_scaled:
        result.copy_((sums[0] * request.postscale / divisor).trunc_())
        return
    carry = sums[1].div(divisor, rounding_mode="floor")
    found = sums[0] + carry
    result.copy_(found + ((found < 0) & (sums[1] != carry * divisor)))


def _as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor).view(-1)


def _scale(tensor: torch.Tensor, factor: float, divisor: int) -> None:
    """Multiply and divide; integers are rounded towards zero, as everywhere."""
    if tensor.is_floating_point() or tensor.is_complex():
        divisor, factor = divisor_and_factor(factor, divisor)
        if divisor != 1:
            # Divide by a tensor: for a number, a GPU would multiply by the rounded reciprocal.
            tensor.div_(torch.full((), divisor, dtype=tensor.dtype, device=tensor.device))
        if factor != 1.0:
            tensor.mul_(factor)
    elif factor != 1.0:
        tensor.copy_((tensor.to(torch.float64) * factor).trunc_())


def _broadcast(group: NcclGroup | None, batch: _Batch) -> None:
    """Copy the root's tensors to all members."""
    entry, work = batch[0]
    response = entry.response
    root = response.members.index(response.requests[0].root)
    for index, spec in enumerate(response.requests[0].tensors):
        output = work.allocate(index, spec.shape)
        if output is not work.inputs[index] and entry.me == root:
            output.copy_(work.inputs[index])
        if spec.count and group is not None:
            group.broadcast(as_bytes(output), root)


def _allgather(group: NcclGroup | None, batch: _Batch) -> None:
    """Concatenate every member's rows."""
    entry, work = batch[0]
    response = entry.response
    for index, spec in enumerate(response.requests[0].tensors):
        specs = [response.request_of(i).tensors[index] for i in range(len(response.members))]
        output = work.allocate(index, (sum(one.shape[0] for one in specs), *spec.shape[1:]))
        if group is None:
            output.copy_(work.inputs[index])
        elif output.numel():
            counts = [one.nbytes for one in specs]
            group.gather(as_bytes(work.inputs[index]), as_bytes(output), counts)


def _alltoall(group: NcclGroup | None, batch: _Batch) -> None:
    """Send each member its rows, and receive this rank's rows."""
    entry, work = batch[0]
    spec = entry.response.requests[0].tensors[0]
    row = spec.shape[1:]
    nbytes = ITEMSIZE[spec.dtype] * torch.Size(row).numel()
    received = [sent[entry.me] for sent in entry.splits]
    output = work.allocate(0, (sum(received), *row))
    if group is None:
        output.copy_(work.inputs[0])
    elif nbytes and any(map(any, entry.splits)):
        give, take = ([rows * nbytes for rows in counts] for counts in (entry.splits[entry.me], received))
        group.exchange(as_bytes(work.inputs[0]), give, as_bytes(output), take)


ROUTINES: dict[Kind, Callable[[NcclGroup | None, _Batch], None]] = {
    Kind.ALLREDUCE: _allreduce,
    Kind.ALLGATHER: _allgather,
    Kind.BROADCAST: _broadcast,
    Kind.ALLTOALL: _alltoall,
    Kind.REDUCESCATTER: _reducescatter,
}
"""How to execute entries of each kind on a device; other kinds go through host memory."""
