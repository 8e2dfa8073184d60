"""Slots of inline messages in a ring buffer at the front of the arena: how they are allocated and filled."""

from __future__ import annotations

import collections

import msgspec

from horovod.core.collectives import COLLECTIVES, is_reduction
from horovod.core.requests import NO_NOTE, ReduceOp, Request, TensorSpec
from horovod.transports.base import Work
from horovod.transports.kernels import Buffer, scale_on_entry
from horovod.transports.libraries import are_spread, kernels_named
from horovod.transports.pieces import LINE, aligned
from horovod.transports.shm.arena import INLINE_BYTES, ROTATION_BYTES, Arena
from horovod.transports.shm.clearing import LEAST_BYTES
from horovod.transports.shm.flags import Flags
from horovod.transports.shm.reuse import Budget

__all__ = ["Sender", "SlotRing", "factor_on_send", "left_to_reduce", "most_views"]

#: Places that the data of one kind of request takes in turn; views of each are kept. Small data gets fewer:
#: writing it is quick anywhere, and there may be thousands of kinds.
_PLACES, _FEW_PLACES = 64, 8
_SMALL_BYTES = 16 << 10
#: A kind that has taken more places than this submits many at once; a rotation has no room for all of them.
_ONE_AFTER_THE_OTHER = 2


def _places_of(nbytes: int) -> int:
    return _PLACES if nbytes >= _SMALL_BYTES else _FEW_PLACES


def most_views(nbytes: int) -> int:
    """Return the number of places whose views are kept, for data of ``nbytes``."""
    return 2 * _places_of(nbytes)


#: Larger data is not scaled as it is sent: this rank would have to read its own place, not its own tensor.
_SCALED_BYTES = 16 << 10


def factor_on_send(request: Request, spec: TensorSpec, members: int) -> float:
    """Return the factor that each rank applies to a tensor as it sends it; unless it is 1, a plain sum remains."""
    if not is_reduction(request.kind) or spec.nbytes > _SCALED_BYTES:
        return 1.0
    return scale_on_entry(spec.dtype, request.op, request.prescale, request.postscale, members)


def left_to_reduce(request: Request, spec: TensorSpec, divisor: int) -> tuple[ReduceOp, float, float, int]:
    """Return the reduction that remains after ``factor_on_send``, factors before and after it, and the divisor."""
    if factor_on_send(request, spec, divisor) != 1.0:
        return ReduceOp.SUM, 1.0, 1.0, 1
    return request.op, request.prescale, request.postscale, divisor


class Sender:
    """Sends the data of one kind of request inline.

    Args:
        arena: this rank's arena.
        budget: the limit of kept views of its slots.
        rank: this rank.
        kernels: name of the kernels that understand the buffers.
        request: the request, the same for every submission.
        members: number of ranks of the process set.

    Attributes:
        nbytes: bytes of one submission, including alignment.
        is_large: whether a library may spread a tensor of it over several threads.
        is_timed: whether to tell ``Clearing`` how long a submission takes.
        step: its places are multiples of this many bytes, so that there are few of them.
        rotation: bytes through which its places rotate while no more are needed.
    """

    def __init__(
        self, arena: Arena, budget: Budget, rank: int, kernels: str, request: Request, members: int
    ) -> None:  # fmt: skip
        self._arena = arena
        self._budget = budget
        self._is_first = True
        self._kernels = kernels
        self._specs = request.tensors
        self._places: dict[int, list[Buffer]] = {}
        self.nbytes = max(LINE, sum(aligned(spec.nbytes) for spec in request.tensors))
        self.is_large = are_spread(request.tensors)
        self.is_timed = members == 2 and self.nbytes >= LEAST_BYTES
        self.step = 1 << (self.nbytes - 1).bit_length()
        self._most = most_views(self.nbytes)
        self.rotation = max(self.step, min(ROTATION_BYTES, _places_of(self.nbytes) * self.step))
        library = kernels_named(kernels)
        root_sends = request.kind in COLLECTIVES and COLLECTIVES[request.kind].root_sends
        shown = request.tensors if not root_sends or request.root == rank else ()
        self._copiers = [library.copier(spec.dtype, factor_on_send(request, spec, members)) for spec in shown]

    def send(self, work: Work, offset: int) -> None:
        """Copy the inputs of ``work`` to the place ``offset``."""
        places = self._places.get(offset)
        if places is None:
            places = self._views(offset)
        for copy, place, source in zip(self._copiers, places, work.inputs):  # noqa: B905  on the way of every call
            copy(place, source)

    def _views(self, offset: int) -> list[Buffer]:
        views, start = [], offset
        for spec in self._specs:
            views.append(self._arena.view_once(self._kernels, start, spec.dtype, spec.shape))
            start += aligned(spec.nbytes)
        if self._is_first:
            self._is_first = False
            return views
        if len(self._places) >= self._most:
            self._places.clear()
        self._budget.charge(self, len(views))
        self._places[offset] = views
        return views

    def forget(self) -> None:
        """Keep no views; see ``Budget``."""
        self._places.clear()


class StagingSlot(msgspec.Struct, eq=False):
    """The slot of one submission whose data was sent inline."""

    start: int  # its place
    readers: tuple[int, ...] = ()  # ranks that may still read it, until their flag reaches `fence`
    fence: int = 0  # flag value that frees the place; 0 until the submission is executed


class SlotRing:
    """The taken places at the front of this rank's arena; a ring, in the order of submission. ``flags`` tell which
    ranks have read which places.
    """

    def __init__(self, flags: Flags) -> None:
        self._flags = flags
        self._taken: collections.deque[StagingSlot] = collections.deque()
        self._next = 0

    def take(self, work: Work, sender: Sender) -> int:
        """Return a place for ``work``, or ``NO_NOTE`` if all are taken."""
        taken = self._taken
        start = self._next + -self._next % sender.step
        end = start + sender.nbytes
        if taken and taken[0].start < self._next and end <= sender.rotation:
            # There is room behind the last slot, so no check of the readers is needed yet.
            self._next = end
            work.slot = slot = StagingSlot(start)
            taken.append(slot)
            return start
        self._free()
        if not taken:
            if end > sender.rotation:
                start, end = 0, sender.nbytes
        else:
            oldest_start = taken[0].start
            if self._next > oldest_start:
                early = end > sender.rotation and sender.nbytes <= oldest_start and len(taken) <= _ONE_AFTER_THE_OTHER
                if early or end > INLINE_BYTES:
                    start, end = 0, sender.nbytes
                    if end > oldest_start:
                        return NO_NOTE
            elif end > oldest_start:
                return NO_NOTE
        self._next = end
        work.slot = StagingSlot(start)
        taken.append(work.slot)
        return start

    def _free(self) -> None:
        """Free the places that no rank reads any more, from the oldest on."""
        taken, reached = self._taken, self._flags.reached
        passed_readers: tuple[int, ...] | None = None
        passed = 0
        while taken:
            oldest = taken[0]
            fence = oldest.fence
            if not fence:
                return
            # Flags only grow: a rank that has passed a later fence has passed those before it. Also try the place
            # before the last: ranks that take turns with this one may still be reading the last place.
            if fence > passed or oldest.readers is not passed_readers:
                passed_readers = readers = oldest.readers
                for later in (taken[-1], taken[-2 if len(taken) > 1 else -1], oldest):
                    if later.readers is readers and later.fence >= fence and reached(readers, later.fence):
                        passed = later.fence
                        break
                else:
                    return
            taken.popleft()
