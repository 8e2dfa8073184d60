"""Inline messages of another library by numpy's functions, which take less time for little data than those of most.

To make an array over a tensor takes longer than it saves. So it is kept, by the address: a tensor of this dtype and
shape that lies there is the same memory, whosesoever it is by then. The array owns nothing, and is used only while a
tensor does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from horovod.core.requests import Kind, Request, TensorSpec
from horovod.transports.base import Entry, Work
from horovod.transports.kernels import Buffer, Kernels
from horovod.transports.libraries import kernels_named
from horovod.transports.shm.arena import Arena
from horovod.transports.shm.eviction import Eviction
from horovod.transports.shm.inline import Plan
from horovod.transports.shm.reuse import Budget
from horovod.transports.shm.slots import Sender, left_to_reduce
from horovod.transports.threads import are_spread

__all__ = ["ArrayPlan", "ArraySender", "has_arrays"]

_NUMPY = "numpy"
_MOST = 64
#: More than any tensor here has. A type for each length would take longer to make than the array.
_Memory = ctypes.c_char * (1 << 20)
#: For these numpy has no arithmetic of its own, or none as quick as that of others.
_OTHERS = frozenset({"bool", "float16", "bfloat16"})


def has_arrays(kernels: str, request: Request, members: int, divisor: int) -> bool:
    """Whether it is worth while to use numpy's functions for a request of another library.

    Args:
        kernels: name of the library's kernels.
        request: the request.
        members: number of ranks that take part.
        divisor: of an average: more than that where ranks have joined.
    """
    specs = request.tensors
    if request.kind is not Kind.ALLREDUCE or members != 2 or len(specs) != 1 or kernels_named(kernels).address is None:
        return False
    spec = specs[0]
    if spec.dtype in _OTHERS or not spec.count or are_spread(specs):
        return False
    return kernels_named(_NUMPY).pair(spec.dtype, *left_to_reduce(request, spec, divisor)) is not None


class _Arrays:
    """The arrays over tensors of one kind.

    Args:
        library: whose tensors these are.
        spec: of each of them.
        budget: for what is kept.
    """

    def __init__(self, library: Kernels, spec: TensorSpec, budget: Budget) -> None:
        assert library.address is not None
        self._address = library.address
        self._spec = spec
        self._budget = budget
        self._known: dict[int, Buffer] = {}
        self._is_first = True

    def over(self, tensor: Buffer) -> Buffer:
        """Return the array over a contiguous tensor; not to be kept."""
        address = self._address(tensor)
        try:
            return self._known[address]
        except KeyError:
            return self._make(address)

    def _make(self, address: int) -> Buffer:
        if not address:
            raise ValueError(
                "a tensor without memory of its own cannot be sent; pass one that is made of it, a clone()"
            )
        spec = self._spec
        array = kernels_named(_NUMPY).view(_Memory.from_address(address), 0, spec.dtype, spec.shape)
        if self._is_first:
            self._is_first = False
            return array
        if len(self._known) >= _MOST:
            self._known.clear()
        self._budget.charge(self, 1)
        self._known[address] = array
        return array

    def forget(self) -> None:
        """Keep none; see ``Budget``."""
        self._known.clear()


class ArraySender(Sender):
    """See ``Sender``."""

    def __init__(
        self, arena: Arena, budget: Budget, rank: int, kernels: str, request: Request, members: int
    ) -> None:  # fmt: skip
        super().__init__(arena, budget, rank, _NUMPY, request, members)
        self._over = _Arrays(kernels_named(kernels), request.tensors[0], budget).over
        self._copy = self._copiers[0]

    def send(self, work: Work, offset: int) -> None:
        """Copy the input of ``work`` to the place ``offset``."""
        self._copy((self._places.get(offset) or self._views(offset))[0], self._over(work.inputs[0]))


class ArrayPlan(Plan):
    """See ``Plan``. What is new has another address every time, and so goes the library's way."""

    def __init__(self, arenas: Sequence[Arena], budget: Budget, eviction: Eviction, entry: Entry, kernels: str) -> None:
        super().__init__(arenas, budget, eviction, entry, _NUMPY)
        self._of_library = Plan(arenas, budget, eviction, entry, kernels)
        self._run = self._in_place(kernels_named(kernels))

    def run(self, work: Work, offsets: tuple[int, ...]) -> None:
        """Execute the entry; every member's data lies at its offset."""
        if work.outputs:
            # As the parent's, without another call: this is on the way of every small operation.
            self._run(work, self._rows.get(offsets) or self._find(offsets))
        else:
            self._of_library.run(work, offsets)

    def _in_place(self, library: Kernels) -> Callable[[Work, list[list[Buffer]]], None]:
        _, pair, own, alone = self._reductions[0]
        over = _Arrays(library, self._entry.response.requests[0].tensors[0], self._budget).over
        changed = library.changed
        assert pair is not None

        def reduce_arrays(work: Work, views: list[list[Buffer]]) -> None:
            first, second = views[0]
            source, target = work.inputs[0], work.outputs[0]
            array = over(source)
            if own == 0:
                first = array
            elif own == 1:
                second = array
            pair(first, second, out=array if target is source else over(target))
            changed(target)
            if alone:
                self._evict(views[0][1 - own])

        return reduce_arrays
