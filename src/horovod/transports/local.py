"""A world, or a process set, of one rank: every collective is a copy."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from horovod.core.collectives import is_reduction
from horovod.core.requests import NO_NOTE, Kind, ReduceOp, Request
from horovod.transports.base import Entry, Transport, Work
from horovod.transports.libraries import kernels_named

__all__ = ["LocalTransport", "run_alone"]


def run_alone(entry: Entry, work: Work) -> None:
    """Execute an entry whose only member is this rank."""
    response = entry.response
    request = response.requests[0]
    kernels = kernels_named(work.kernels)
    for index, spec in enumerate(request.tensors):
        source = work.inputs[index]
        out = work.allocate(index, spec.shape)
        if is_reduction(response.kind):
            # The Adasum of one tensor is that tensor.
            op = ReduceOp.SUM if request.op is ReduceOp.ADASUM else request.op
            reduce = kernels.reducer(spec.dtype, op, request.prescale, request.postscale, response.divisor)
            if spec.count:
                reduce(out.reshape(-1), [source.reshape(-1)])
        elif out is not source:
            kernels.copy(out, source)


class LocalTransport(Transport):
    """See ``Transport``; the reference implementation."""

    name = "local"
    is_awaited = False
    fresh: tuple[int, ...] = ()

    def takes(self, device: str, kind: Kind, op: ReduceOp, dtypes: Sequence[str]) -> bool:
        return device.partition(":")[0] == "cuda"

    def allocate(self, nbytes: int) -> bytearray:
        return bytearray(nbytes)

    def place(self, addresses: Sequence[int]) -> tuple[int, ...]:
        return ()

    def fuse_class(self, request: Request) -> str:
        return ""

    def inline(self, kernels: str, request: Request, members: int) -> None:
        """Return None: no other rank reads the data."""

    def offer(self, work: Work, inline: None) -> int:
        return NO_NOTE

    def run(self, sequence: int, batch: Sequence[tuple[Entry, Work]], notes: tuple[int, ...]) -> int:
        for entry, work in batch:
            if entry.response.requests[0].device == "cpu":
                run_alone(entry, work)
            else:
                # A caller with a tensor of a device has loaded its framework.
                importlib.import_module("horovod.transports.on_device").execute(None, [(entry, work)])
        return 0

    def settled(self, members: Sequence[int], fence: int) -> bool:
        return True

    def skip(self, work: Work) -> None:
        """Nothing to forget."""

    def rest(self) -> None:
        """Nothing to give back."""

    def close(self) -> None:
        """Nothing to release."""
