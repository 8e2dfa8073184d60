"""Which number stands for which request: the rank's half of what Horovod calls the response cache."""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any

import msgspec

from horovod.core import rules
from horovod.core.process_sets import ProcessSetTable
from horovod.core.requests import Kind, ReduceOp, Request, TensorSpec
from horovod.engine import callsite
from horovod.engine.handles import Allocator, Signature
from horovod.engine.ports import Channel
from horovod.engine.stats import Usage
from horovod.errors import RequestError
from horovod.phrases import printable
from horovod.transports.base import Transport
from horovod.transports.kernels import Buffer

__all__ = ["SignatureTable"]


# An attribute of an enum class costs more than a name, in every operation.
_ALLREDUCE = Kind.ALLREDUCE


def dtype_name(buffer: Any) -> str:
    """Return the canonical dtype name of a torch tensor or a numpy array."""
    return str(buffer.dtype).rpartition(".")[2]


class SignatureTable:
    """Declares a request the first time it is seen and hands out its number from then on.

    Args:
        channel: where requests are declared.
        capacity: how many are remembered; those in flight are never forgotten.
        rank: this rank.
        sets: the process sets.
        transport: moves the bytes.
    """

    def __init__(self, channel: Channel, capacity: int, rank: int, sets: ProcessSetTable, transport: Transport) -> None:
        self._channel = channel
        self._rank = rank
        self._sets = sets
        self._transport = transport
        self._capacity = capacity
        self._known: dict[Any, Signature] = {}
        self._next = 0
        self._forgotten: dict[Kind, Usage] = {}

    def get(
        self,
        allocator: Allocator,
        frame: FrameType,
        kind: Kind,
        name: str | None,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer] | None,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        root: int,
        splits: tuple[int, ...],
        process_set: int,
        ranks: tuple[int, ...],
        device: str,
    ) -> Signature:
        """Return the signature of a request; see ``Engine.submit`` for the arguments.

        Raises:
            RequestError: the request is wrong by itself.
        """
        code = frame.f_code
        in_place = kind is _ALLREDUCE and outputs is not None
        how = (op, prescale, postscale, root, splits, process_set, self._sets.version, ranks, device)
        placement: tuple[int, ...] = ()
        if len(inputs) == 1:
            tensor = inputs[0]
            if in_place and outputs is not None and outputs[0] is tensor:
                placement = self._transport.place((allocator.address(tensor),))
            key: Any = (kind, name, tensor.dtype, tensor.shape, placement, how, id(code), frame.f_lasti)
        else:
            if in_place and outputs is not None and all(a is b for a, b in zip(inputs, outputs, strict=True)):
                placement = self._transport.place([allocator.address(tensor) for tensor in inputs])
            tensors = tuple((t.dtype, t.shape) for t in inputs)
            key = (kind, name, tensors, placement, how, id(code), frame.f_lasti)
        signature = self._known.get(key)
        if signature is not None:
            return signature
        specs = tuple(TensorSpec(dtype_name(tensor), tuple(tensor.shape)) for tensor in inputs)
        request = Request(
            printable(name or ""), kind, process_set, specs, op, float(prescale), float(postscale), root, splits,
            device, ranks, placement=placement, site=callsite.describe(frame),
        )  # fmt: skip
        members = self._sets.members(process_set) if process_set in self._sets else None
        error = rules.check(request, members, self._rank)
        if error:
            raise RequestError(f"{error} (at {request.site})")
        request = msgspec.structs.replace(request, fuse_class=self._transport.fuse_class(request))
        inline = self._transport.inline(allocator.kernels, request, len(members or ()))
        signature = self._known[key] = Signature(self._new_id(), request, inline, code)
        self._channel.declare(signature.id, request)
        return signature

    def usage(self) -> dict[Kind, Usage]:
        """Return how much was submitted, by kind."""
        found = dict(self._forgotten)
        for signature in list(self._known.values()):
            _count(found, signature)
        return found

    def count(self, request: Request) -> tuple[int, int]:
        """Return how often an operation of this name was submitted, as far as is remembered, and how many were in all.

        Operations without a name count together.
        """
        known = list(self._known.values())
        key = (request.process_set, request.name)
        times = sum(s.uses for s in known if (s.request.process_set, s.request.name) == key)
        return times, sum(usage.operations for usage in self._forgotten.values()) + sum(s.uses for s in known)

    def _new_id(self) -> int:
        if len(self._known) >= self._capacity:
            for key, signature in self._known.items():
                if signature.in_flight == 0:
                    del self._known[key]
                    _count(self._forgotten, signature)
                    return signature.id
        self._next += 1
        return self._next - 1


def _count(into: dict[Kind, Usage], signature: Signature) -> None:
    kind = signature.request.kind
    before = into.get(kind, Usage())
    into[kind] = Usage(before.operations + signature.uses, before.bytes + signature.uses * signature.nbytes)
