"""The requests of this rank and their numbers: its half of Horovod's response cache."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from operator import is_
from types import FrameType
from typing import Any

import msgspec

from horovod.core import collectives
from horovod.core.process_sets import ProcessSetTable
from horovod.core.requests import Kind, Request, TensorSpec
from horovod.engine import callsite
from horovod.engine.calls import Call
from horovod.engine.handles import Allocator, CachedRequest, Handle
from horovod.engine.ports import Channel
from horovod.engine.stats import Usage
from horovod.errors import RequestError
from horovod.transports.base import Transport
from horovod.transports.kernels import Buffer

__all__ = ["RequestCache"]


# An attribute of an enum class costs more than a name, in every operation.
_ALLREDUCE, _REDUCESCATTER = Kind.ALLREDUCE, Kind.REDUCESCATTER
#: Members write to each other's results in these, unless the framework makes results in its own memory.
_EXCHANGES = frozenset(filter(collectives.has_rows_of_others, Kind))
#: How many cached requests are checked to find one that can be forgotten.
_TRIES = 4


def dtype_name(buffer: Any) -> str:
    """Return the canonical dtype name of a torch tensor or a numpy array."""
    return str(buffer.dtype).rpartition(".")[2]


class RequestCache:
    """Describes a request the first time it is seen; declares it and gives it a number when it is submitted.

    Every submitting thread calls ``get``; it adds to the table in one step, so it may be interrupted anywhere. The
    engine calls all other methods. Requests in flight are never forgotten, even beyond ``capacity``.
    """

    def __init__(self, channel: Channel, capacity: int, rank: int, sets: ProcessSetTable, transport: Transport) -> None:
        self._channel = channel
        self._rank = rank
        self._sets = sets
        self._transport = transport
        self._fresh = transport.fresh
        self._capacity = capacity
        # The first one is forgotten first. In a plain dict, the search for the first key visits all removed ones.
        self._known: collections.OrderedDict[Any, CachedRequest] = collections.OrderedDict()
        self._free: collections.deque[int] = collections.deque()
        self._fresh_ids = itertools.count()
        self._forgotten: dict[Kind, Usage] = {}

    def get(
        self,
        call: Call,
        allocator: Allocator,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer] | None,
        frame: FrameType,
    ) -> CachedRequest:
        """Return the cached request of a call; make it the first time.

        Raises:
            RequestError: the request is wrong by itself.
        """
        code, kind = frame.f_code, call.kind
        placement: tuple[int, ...] = ()
        makes_result = getattr(allocator, "over", None) is not None
        is_placed = kind is _REDUCESCATTER and call.device == "cpu"
        if kind is _ALLREDUCE and outputs is not None:
            is_placed = all(map(is_, inputs, outputs))
        elif kind is _ALLREDUCE or kind in _EXCHANGES:
            placement = self._fresh * len(inputs) if makes_result or outputs is not None else ()
        if is_placed:
            placement = self._transport.place([*map(allocator.address, inputs)])
        if len(inputs) == 1:  # without the loop, which costs as much as the rest
            (tensor,) = inputs
            specs: tuple[Any, ...] = (tensor.dtype, tensor.shape)
        else:
            specs = tuple([(tensor.dtype, tensor.shape) for tensor in inputs])
        key = (call, specs, placement, self._sets.version, id(code), frame.f_lasti)
        cached = self._known.get(key)
        if cached is not None:
            return cached
        return self._known.setdefault(key, self._describe(call, inputs, placement, frame))

    def _describe(
        self, call: Call, inputs: Sequence[Buffer], placement: tuple[int, ...], frame: FrameType
    ) -> CachedRequest:
        specs = tuple(TensorSpec(dtype_name(tensor), tuple(tensor.shape)) for tensor in inputs)
        request = Request(
            call.name, call.kind, call.process_set, specs, call.op, call.prescale, call.postscale,
            call.root, call.splits, call.device, call.ranks, parts=call.parts,
            placement=placement, site=callsite.describe(frame),
        )  # fmt: skip
        error = self.check(request)
        if error:
            raise RequestError(f"{error} (at {request.site})")
        request = msgspec.structs.replace(request, fuse_class=self._transport.fuse_class(request))
        return CachedRequest(request, frame.f_code)

    def check(self, request: Request) -> str:
        """Return why a request of this rank is wrong by itself, or an empty string."""
        return collectives.check(request, self._members(request), self._rank)

    def declare(self, handle: Handle) -> None:
        """Give the request of a submission a number, and declare it to the coordinator."""
        cached = handle.cached
        request = cached.request
        cached.inline = self._transport.inline(handle.kernels, request, len(self._members(request) or ()))
        self._forget_surplus()
        cached.id = self._free.popleft() if self._free else next(self._fresh_ids)
        self._channel.declare(cached.id, request)

    def usage(self, others: Sequence[Handle]) -> dict[Kind, Usage]:
        """Return how much was submitted, by kind; ``others`` are what the engine has not taken over yet."""
        found = dict(self._forgotten)
        for handle in others:
            _count(found, handle.cached, 1)
        for cached in list(self._known.values()):
            _count(found, cached, cached.uses)
        return found

    def count(self, request: Request) -> tuple[int, int]:
        """Return how often an operation of this name was submitted, as far as cached, and the number of all operations.

        Operations without a name count together.
        """
        known = list(self._known.values())
        key = (request.process_set, request.name)
        times = sum(s.uses for s in known if (s.request.process_set, s.request.name) == key)
        forgotten = list(self._forgotten.values())
        return times, sum(usage.operations for usage in forgotten) + sum(s.uses for s in known)

    def _members(self, request: Request) -> Sequence[int] | None:
        return self._sets.find_members(request.process_set)

    def _forget_surplus(self) -> None:
        known = self._known
        for _ in range(_TRIES):
            if len(known) <= self._capacity:
                return
            try:
                key = next(iter(known))
            except RuntimeError:  # another thread adds one at this moment
                return
            cached = known.pop(key)
            if cached.in_flight or cached.id < 0:
                # Move it to the end, so that all others are checked before it is checked again.
                known.setdefault(key, cached)
                continue
            _count(self._forgotten, cached, cached.uses)
            self._free.append(cached.id)
            cached.id, cached.uses = -1, 0


def _count(into: dict[Kind, Usage], cached: CachedRequest, uses: int) -> None:
    kind = cached.request.kind
    before = into.get(kind, Usage())
    into[kind] = Usage(before.operations + uses, before.bytes + uses * cached.nbytes)
