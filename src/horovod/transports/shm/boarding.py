"""How the data of a small collective gets aboard its request: into which place, and when that is free again."""

from __future__ import annotations

import collections

import msgspec

from horovod.core.requests import NO_NOTE, Kind, Request, TensorSpec
from horovod.transports.base import Work
from horovod.transports.kernels import Buffer, scale_on_entry
from horovod.transports.libraries import kernels_named
from horovod.transports.shm.arena import INLINE_BYTES, Arena
from horovod.transports.shm.caches import ROTATION_BYTES
from horovod.transports.shm.flags import Flags
from horovod.transports.shm.handover import LEAST_BYTES
from horovod.transports.shm.reuse import Budget
from horovod.transports.threads import are_spread

__all__ = ["KINDS", "REDUCTIONS", "Berths", "Rider", "most_views", "scale_aboard", "span"]

KINDS = frozenset({Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER, Kind.BARRIER})
REDUCTIONS = (Kind.ALLREDUCE, Kind.REDUCESCATTER)
_ALIGN = 64
#: Places that the data of one kind of request takes in turn; views of each are kept. What is small is quick to write
#: anywhere, and there may be thousands of its kinds.
_PLACES, _FEW_PLACES = 64, 8
_SMALL_BYTES = 16 << 10
#: Who has more aboard submits many at once: there would not be room for them in what is free of a rotation.
_ONE_AFTER_THE_OTHER = 2


def _places_of(nbytes: int) -> int:
    return _PLACES if nbytes >= _SMALL_BYTES else _FEW_PLACES


def most_views(nbytes: int) -> int:
    """Return of how many places to keep views, for data of ``nbytes``."""
    return 2 * _places_of(nbytes)


#: Larger data is not scaled on its way aboard: this rank would have to read its own place, not its own tensor.
_SCALED_BYTES = 16 << 10


def scale_aboard(request: Request, spec: TensorSpec, members: int) -> float:
    """Return by what each rank multiplies a tensor on its way aboard; then what remains is a plain sum."""
    if request.kind not in REDUCTIONS or spec.nbytes > _SCALED_BYTES:
        return 1.0
    return scale_on_entry(spec.dtype, request.op, request.prescale, request.postscale, members)


def span(nbytes: int) -> int:
    """Return how much of a place a tensor takes."""
    return -(-nbytes // _ALIGN) * _ALIGN


class Rider:
    """How the data of one kind of request gets aboard.

    Args:
        arena: this rank's.
        budget: for views of the places that are taken.
        rank: this rank.
        kernels: name of the kernels that understand the buffers.
        request: as every submission of it.
        members: number of ranks of the process set.

    Attributes:
        nbytes: of one submission, including what alignment costs.
        timed: whether it is worth while to see how long it takes to fill a place.
        is_large: whether a library may spread a tensor of it over several threads.
        step: its places are multiples of this many bytes, so that there are few of them.
        rotation: bytes through which it moves while there is no need for more.
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
        self.nbytes = max(_ALIGN, sum(span(spec.nbytes) for spec in request.tensors))
        self.is_large = are_spread(request.tensors)
        self.step = 1 << (self.nbytes - 1).bit_length()
        self._most = most_views(self.nbytes)
        self.rotation = max(self.step, min(ROTATION_BYTES, _places_of(self.nbytes) * self.step))
        library = kernels_named(kernels)
        # Of a broadcast nobody reads what the others have.
        shown = request.tensors if request.kind is not Kind.BROADCAST or request.root == rank else ()
        self.timed = members == 2 and bool(shown) and self.nbytes >= LEAST_BYTES
        self._copiers = [library.copier(spec.dtype, scale_aboard(request, spec, members)) for spec in shown]

    def knows(self, token: int) -> bool:
        """Whether ``board`` has filled the place ``token`` before."""
        return token in self._places

    def board(self, work: Work, token: int) -> None:
        """Copy the inputs of ``work`` to the place ``token``."""
        places = self._places.get(token)
        if places is None:
            places = self._views(token)
        for copy, place, source in zip(self._copiers, places, work.inputs):  # noqa: B905  on the way of every call
            copy(place, source)

    def _views(self, token: int) -> list[Buffer]:
        views, start = [], token
        for spec in self._specs:
            views.append(self._arena.view_once(self._kernels, start, spec.dtype, spec.shape))
            start += span(spec.nbytes)
        if self._is_first:
            self._is_first = False
            return views
        if len(self._places) >= self._most:
            self._places.clear()
        self._budget.charge(self, len(views))
        self._places[token] = views
        return views

    def forget(self) -> None:
        """Keep no views; see ``Budget``."""
        self._places.clear()


class Ride(msgspec.Struct, eq=False):
    """Of one submission whose data is aboard.

    Attributes:
        start: its place.
        readers: ranks that may still read it, until their flag reaches ``fence``.
        fence: flag value that frees the place; 0 while nobody has executed it.
    """

    start: int
    readers: tuple[int, ...] = ()
    fence: int = 0


class Berths:
    """Which places at the front of this rank's arena are taken; a ring, in the order of submission.

    Args:
        flags: tell who has read what.
    """

    def __init__(self, flags: Flags) -> None:
        self._flags = flags
        self._aboard: collections.deque[Ride] = collections.deque()
        self._next = 0

    def take(self, work: Work, rider: Rider) -> int:
        """Return a place for ``work``, or ``NO_NOTE`` if all are taken."""
        aboard = self._aboard
        while aboard:
            oldest = aboard[0]
            if not oldest.fence or not self._flags.reached(oldest.readers, oldest.fence):
                break
            aboard.popleft()
        start = self._next + -self._next % rider.step
        end = start + rider.nbytes
        if not aboard:
            if end > rider.rotation:
                start, end = 0, rider.nbytes
        else:
            oldest_start = aboard[0].start
            if self._next > oldest_start:
                early = end > rider.rotation and rider.nbytes <= oldest_start and len(aboard) <= _ONE_AFTER_THE_OTHER
                if early or end > INLINE_BYTES:
                    start, end = 0, rider.nbytes
                    if end > oldest_start:
                        return NO_NOTE
            elif end > oldest_start:
                return NO_NOTE
        self._next = end
        work.slot = Ride(start)
        aboard.append(work.slot)
        return start
