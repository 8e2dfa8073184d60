"""The collectives of Horovod's API, written once over an ``Adapter``.

Every operation is three steps: the adapter gives contiguous aliases of the tensors, the engine submits one
request for all of them, and somebody waits. Synchronous ones skip the table of handles and let the calling
thread make the progress.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from horovod.bindings.adapter import Adapter
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.bindings.worldly import Worldly
from horovod.core.requests import ITEMSIZE, Kind, ReduceOp
from horovod.engine import context
from horovod.engine.handles import Handle

__all__ = ["Adasum", "Average", "Collectives", "Max", "Min", "Product", "Sum", "resolve_op"]

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

_engine = context.engine


def resolve_op(op: int | None, average: bool | None) -> ReduceOp:
    """Return the reduction that ``op`` and Horovod's older ``average`` ask for.

    Raises:
        ValueError: both are given, or ``op`` is none of the reductions.
    """
    if average is None:
        if op is None:
            return ReduceOp.AVERAGE
        try:
            return ReduceOp(op)
        except ValueError:
            raise ValueError(f"op must be Average, Sum, Adasum, Min, Max or Product, received {op!r}") from None
    if op is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    warnings.warn("Parameter `average` has been replaced with `op`", DeprecationWarning, stacklevel=3)
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


class _Ticket(NamedTuple):
    """A handle, and what its outputs mean to the caller."""

    handle: Handle
    many: bool
    targets: Sequence[Any] | None
    copies: Sequence[Any] | None


class Collectives(Worldly):
    """See the module.

    Args:
        adapter: the framework.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._tickets: dict[int, _Ticket] = {}
        self._numbers = itertools.count(1)

    # -- allreduce -----------------------------------------------------------------------------------------------

    def allreduce_async(
        self, tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> int:  # fmt: skip
        """Begin an allreduce into a new tensor; ``synchronize`` returns it."""
        how = resolve_op(op, average)
        return self._start(
            Kind.ALLREDUCE,
            name,
            [tensor],
            None,
            process_set,
            op=how,
            prescale=prescale_factor,
            postscale=postscale_factor,
        )  # fmt: skip

    def allreduce_async_(
        self, tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> int:  # fmt: skip
        """Begin an allreduce in place; ``synchronize`` returns ``tensor``."""
        how = resolve_op(op, average)
        return self._start(
            Kind.ALLREDUCE, name, [tensor], [tensor], process_set, op=how, prescale=prescale_factor,
            postscale=postscale_factor,
        )  # fmt: skip

    def allreduce(
        self, tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> Any:  # fmt: skip
        """Combine a tensor over all ranks into a new one."""
        how = resolve_op(op, average)
        return self._run(
            Kind.ALLREDUCE,
            name,
            [tensor],
            None,
            process_set,
            op=how,
            prescale=prescale_factor,
            postscale=postscale_factor,
        )[0]  # fmt: skip

    def allreduce_(
        self, tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> Any:  # fmt: skip
        """Combine a tensor over all ranks, in place."""
        how = ReduceOp.AVERAGE if op is None and average is None else resolve_op(op, average)
        buffer = self.adapter.buffer(tensor)
        if buffer is None:
            return self._run(
                Kind.ALLREDUCE, name, [tensor], [tensor], process_set, op=how, prescale=prescale_factor,
                postscale=postscale_factor,
            )[0]  # fmt: skip
        # The hot path of small tensors: nothing but what has to be done.
        engine = _engine()
        buffers = (buffer,)
        handle = engine.submit(
            self.adapter, Kind.ALLREDUCE, f"allreduce.{name}" if name else None, buffers, buffers, op=how,
            prescale=prescale_factor, postscale=postscale_factor, process_set=_id(process_set), kick=False,
        )  # fmt: skip
        engine.wait(handle)
        return tensor

    def grouped_allreduce_async(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> int:  # fmt: skip
        """Begin an allreduce of several tensors as one operation; ``synchronize`` returns a tuple."""
        how = resolve_op(op, average)
        return self._start(
            Kind.ALLREDUCE, name, tensors, None, process_set, many=True, op=how, prescale=prescale_factor,
            postscale=postscale_factor,
        )  # fmt: skip

    def grouped_allreduce_async_(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> int:  # fmt: skip
        """Begin an allreduce of several tensors in place, as one operation."""
        how = resolve_op(op, average)
        return self._start(
            Kind.ALLREDUCE, name, tensors, tensors, process_set, many=True, op=how, prescale=prescale_factor,
            postscale=postscale_factor,
        )  # fmt: skip

    def grouped_allreduce(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> list[Any]:  # fmt: skip
        """Combine several tensors as one operation."""
        how = resolve_op(op, average)
        return self._run(
            Kind.ALLREDUCE,
            name,
            tensors,
            None,
            process_set,
            op=how,
            prescale=prescale_factor,
            postscale=postscale_factor,
        )  # fmt: skip

    def grouped_allreduce_(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> list[Any]:  # fmt: skip
        """Combine several tensors in place, as one operation."""
        how = resolve_op(op, average)
        return self._run(
            Kind.ALLREDUCE, name, tensors, tensors, process_set, op=how, prescale=prescale_factor,
            postscale=postscale_factor,
        )  # fmt: skip

    # -- allgather -----------------------------------------------------------------------------------------------

    def allgather_async(
        self, tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Begin an allgather; ``synchronize`` returns the result."""
        return self._start(Kind.ALLGATHER, name, [tensor], None, process_set)

    def allgather(self, tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
        """Concatenate every rank's tensor along the first dimension, in rank order."""
        return self._run(Kind.ALLGATHER, name, [tensor], None, process_set)[0]

    def grouped_allgather_async(
        self, tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Begin an allgather of several tensors as one operation; ``synchronize`` returns a tuple."""
        return self._start(Kind.ALLGATHER, name, tensors, None, process_set, many=True)

    def grouped_allgather(
        self, tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> list[Any]:
        """Concatenate several tensors, as one operation."""
        return self._run(Kind.ALLGATHER, name, tensors, None, process_set)

    # -- broadcast -----------------------------------------------------------------------------------------------

    def broadcast_async(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Begin a broadcast into a new tensor."""
        return self._start(Kind.BROADCAST, name, [tensor], None, process_set, root=_rank(root_rank))

    def broadcast_async_(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Begin a broadcast in place."""
        return self._start(Kind.BROADCAST, name, [tensor], [tensor], process_set, root=_rank(root_rank))

    def broadcast(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Any:
        """Return the root's tensor; ``root_rank`` is a global rank."""
        return self._run(Kind.BROADCAST, name, [tensor], None, process_set, root=_rank(root_rank))[0]

    def broadcast_(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Any:
        """Overwrite a tensor with the root's."""
        return self._run(Kind.BROADCAST, name, [tensor], [tensor], process_set, root=_rank(root_rank))[0]

    # -- alltoall ------------------------------------------------------------------------------------------------

    def alltoall_async(
        self, tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Begin an alltoall; ``synchronize`` returns (output, received splits)."""
        numbers = () if splits is None else self.adapter.splits(splits)
        if splits is not None and not numbers:
            raise ValueError("alltoall got empty splits; pass None for even ones")
        return self._start(Kind.ALLTOALL, name, [tensor], None, process_set, splits=numbers)

    def alltoall(
        self, tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Any:
        """Send the i-th split of the rows to the i-th rank.

        Returns:
            The received rows in rank order; with ``splits`` also how many came from each rank.
        """
        output, received = self.synchronize(self.alltoall_async(tensor, splits, name, process_set))
        return output if splits is None else (output, received)

    # -- reducescatter -------------------------------------------------------------------------------------------

    def reducescatter_async(
        self, tensor: Any, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    ) -> int:  # fmt: skip
        """Begin a reducescatter."""
        return self._start(
            Kind.REDUCESCATTER, name, [tensor], None, process_set, op=_scatter_op(op), prescale=prescale_factor,
            postscale=postscale_factor,
        )  # fmt: skip

    def reducescatter(
        self, tensor: Any, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    ) -> Any:  # fmt: skip
        """Combine a tensor over all ranks and return this rank's rows of the result."""
        return self._run(
            Kind.REDUCESCATTER, name, [tensor], None, process_set, op=_scatter_op(op), prescale=prescale_factor,
            postscale=postscale_factor,
        )[0]  # fmt: skip

    def grouped_reducescatter_async(
        self, tensors: Sequence[Any], name: str | None = None, op: int = Average,
        process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    ) -> int:  # fmt: skip
        """Begin a reducescatter of several tensors as one operation."""
        return self._start(
            Kind.REDUCESCATTER, name, tensors, None, process_set, many=True, op=_scatter_op(op),
            prescale=prescale_factor, postscale=postscale_factor,
        )  # fmt: skip

    def grouped_reducescatter(
        self, tensors: Sequence[Any], name: str | None = None, op: int = Average,
        process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    ) -> list[Any]:  # fmt: skip
        """Combine several tensors and return this rank's rows of each, as one operation."""
        return self._run(
            Kind.REDUCESCATTER, name, tensors, None, process_set, op=_scatter_op(op), prescale=prescale_factor,
            postscale=postscale_factor,
        )  # fmt: skip

    # -- without data --------------------------------------------------------------------------------------------

    def barrier(self, process_set: ProcessSet = global_process_set) -> None:
        """Return when every rank has called."""
        self._run(Kind.BARRIER, None, [], [], process_set)

    def join(self, device: int = -1) -> int:
        """Take no part in what the others still do; return when all ranks have joined.

        Args:
            device: accepted for Horovod's sake.

        Returns:
            The rank that joined last.
        """
        engine = _engine()
        handle = engine.submit(self.adapter, Kind.JOIN, "join", (), (), kick=False)
        engine.wait(handle)
        return handle.result

    # -- handles -------------------------------------------------------------------------------------------------

    def poll(self, handle: int) -> bool:
        """Return whether an operation is done, so that ``synchronize`` will not block.

        Raises:
            ValueError: there is no such handle.
        """
        ticket = self._tickets.get(handle)
        if ticket is None:
            raise ValueError(f"handle {handle} was not created, or its operation was synchronized already")
        return ticket.handle.done

    def synchronize(self, handle: int) -> Any:
        """Wait for an operation and return its result.

        Args:
            handle: of an ``_async`` call; an unknown one returns None at once, as in Horovod.

        Raises:
            HorovodInternalError: what went wrong, see ``horovod.errors``.
        """
        ticket = self._tickets.pop(handle, None)
        if ticket is None:
            return None
        inner = ticket.handle
        outputs: Sequence[Any] = _wait(inner)
        if inner.signature.request.kind is Kind.ALLTOALL:
            return outputs[0], self.adapter.received_splits(inner.received_splits, outputs[0])
        results = self._results(ticket.targets, ticket.copies, outputs)
        return tuple(results) if ticket.many else results[0]

    # -- tensors in the arena ------------------------------------------------------------------------------------

    def zeros(self, *shape: Any, dtype: Any = None) -> Any:
        """Return a tensor of zeros in memory that all ranks of the host share.

        In-place allreduce of such a tensor copies nothing. The memory is freed with the tensor.

        Args:
            shape: dimensions, as numbers or one sequence.
            dtype: of the framework; its default when None.

        Raises:
            MemoryError: the arena is full.
        """
        dims = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        dims = tuple(int(dim) for dim in dims)
        name = dtype if isinstance(dtype, str) else self.adapter.dtype_name(dtype)
        nbytes = ITEMSIZE[name]
        for dim in dims:
            nbytes *= dim
        arena = _engine().arena
        memory = bytearray(max(nbytes, 1)) if arena is None else arena.allocate(max(nbytes, 1))
        if nbytes == 0:
            return self.adapter.empty(dims, name, self.adapter.over(memory, (1,), "uint8"))
        return self.adapter.over(memory, dims, name)

    #: The same as ``zeros``: fresh memory of the arena is zero anyway.
    empty = zeros

    # -- the three steps -----------------------------------------------------------------------------------------

    def _start(
        self, kind: Kind, name: str | None, tensors: Sequence[Any], targets: Sequence[Any] | None,
        process_set: ProcessSet, *, many: bool = False, kick: bool = True, **how: Any,
    ) -> int:  # fmt: skip
        ticket = self._submit(kind, name, tensors, targets, process_set, many=many, kick=kick, **how)
        number = next(self._numbers)
        self._tickets[number] = ticket
        return number

    def _run(
        self, kind: Kind, name: str | None, tensors: Sequence[Any], targets: Sequence[Any] | None,
        process_set: ProcessSet, **how: Any,
    ) -> list[Any]:  # fmt: skip
        ticket = self._submit(kind, name, tensors, targets, process_set, many=True, kick=False, **how)
        return self._results(ticket.targets, ticket.copies, _wait(ticket.handle))

    def _submit(
        self, kind: Kind, name: str | None, tensors: Sequence[Any], targets: Sequence[Any] | None,
        process_set: ProcessSet, *, many: bool, kick: bool, **how: Any,
    ) -> _Ticket:  # fmt: skip
        engine = _engine()
        adapter = self.adapter
        if many and kind is not Kind.BARRIER and not len(tensors):
            raise ValueError(f"{kind.name.lower()} of an empty list of tensors")
        inputs = []
        for tensor in tensors:
            buffer = adapter.buffer(tensor)
            inputs.append(adapter.contiguous(tensor) if buffer is None else buffer)
        wire_name = f"{kind.name.lower()}.{name}" if name else None
        outputs = inputs if targets is not None else None
        handle = engine.submit(
            adapter, kind, wire_name, inputs, outputs, process_set=_id(process_set), depth=3, kick=kick, **how
        )
        return _Ticket(handle, many, targets, inputs if targets is not None else None)

    def _results(
        self, targets: Sequence[Any] | None, copies: Sequence[Any] | None, outputs: Sequence[Any]
    ) -> list[Any]:
        if targets is None or copies is None:
            return list(outputs)
        for target, copy in zip(targets, copies, strict=True):
            if self.adapter.buffer(target) is None:
                self.adapter.write_back(target, copy)
        return list(targets)


def _wait(handle: Handle) -> Sequence[Any]:
    if handle.done and handle.error is None:
        return handle.outputs
    return _engine().wait(handle)


def _id(process_set: ProcessSet) -> int:
    key = process_set.process_set_id
    if key is None:
        raise ValueError(f"{process_set} is not registered; call add_process_set() or pass it to init(process_sets=)")
    return key


def _rank(root: int) -> int:
    if isinstance(root, bool) or not hasattr(root, "__index__"):
        raise TypeError(f"root_rank must be an integer, received {root!r}")
    return root.__index__()


def _scatter_op(op: int) -> ReduceOp:
    how = resolve_op(op, None)
    if how is ReduceOp.ADASUM:
        raise ValueError("reducescatter takes Average, Sum, Min, Max or Product, received Adasum")
    return how
