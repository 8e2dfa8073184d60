"""Execution of every collective: submit, wait, return the results.

The adapter gives contiguous aliases of the tensors, the engine submits one request for all of them, and the
caller waits. Synchronous operations skip the table of handles.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import msgspec

from horovod import context
from horovod.bindings.adapter import Adapter, TensorTransfer
from horovod.bindings.misuse import find_open, without_class_names
from horovod.bindings.process_sets import ProcessSet, at_init, id_or_none, not_registered
from horovod.core.collectives import keeps_shape
from horovod.core.requests import ITEMSIZE, Kind, ReduceOp
from horovod.engine.calls import Call
from horovod.engine.handles import Handle
from horovod.errors import RequestError
from horovod.transports.kernels import Buffer

__all__ = ["Submission", "find_overlaps", "id_of"]

_engine = context.engine


class _Open(msgspec.Struct):
    """A handle, and the data that turns its outputs into the caller's results."""

    handle: Handle
    many: bool  # whether the caller gets a list of tensors
    targets: Sequence[Any] | None = None  # the caller's tensors, for an in-place operation
    copies: Sequence[tuple[Any, Any]] = ()  # non-contiguous targets, each with the buffer to write back to it
    passing: TensorTransfer | None = None  # transfer of device tensors, if the results are not written to `targets`


@without_class_names
class Submission:
    """Pending operations of one framework, and tensors in the arena."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._open: dict[int, _Open] = {}
        self._numbers = itertools.count(1)
        self._generation = context.init_count()
        self._lost: frozenset[int] = frozenset()
        at_init(self._forget)
        # Numpy kernels detect a read-only target only during the operation, so check it here.
        self._target = self._checked_target if adapter.kernels == "numpy" or not adapter.writable else adapter.target

    def _forget(self) -> None:
        """Forget operations started before the last ``init()`` or membership change."""
        if self._generation != context.init_count():
            self._generation = context.init_count()
            self._lost = frozenset(self._open)
            self._open.clear()

    # -- handles -------------------------------------------------------------------------------------------------

    def poll(self, handle: int) -> bool:
        """Return whether an operation is done, so that ``synchronize`` will not block.

        Args:
            handle: handle of an ``_async`` call that was not synchronized yet.

        Raises:
            ValueError: the handle is unknown or was synchronized already.
        """
        open_handle = find_open(self._open, handle)
        if open_handle is None:
            raise ValueError(f"handle {handle} was not created, or its operation was synchronized already")
        return open_handle.handle.done or _engine().poll(open_handle.handle)

    def synchronize(self, handle: int) -> Any:
        """Wait for an operation and return its result.

        Args:
            handle: handle of an ``_async`` call; an unknown handle returns None immediately, as in Horovod.

        Returns:
            The result of the blocking form; of a grouped operation a list.

        Raises:
            ValueError: ``handle`` is no handle, such as a list of them.
            HorovodInternalError: the operation failed; its subclass says why, as for the blocking form.

        Blocks until all ranks called.
        """
        open_handle = find_open(self._open, handle)
        if open_handle is None:
            if handle in self._lost:
                raise RequestError(
                    f"the operation of handle {handle} was begun before the membership of the job changed"
                )
            return None
        inner = open_handle.handle
        try:
            outputs = _wait(inner)
        except BaseException:
            # Keep an unfinished handle: after an interrupt the caller may wait again.
            if inner.done:
                self._open.pop(handle, None)
            raise
        results: Any = tuple(self._results(open_handle, outputs))
        if inner.cached.request.kind is Kind.ALLTOALL:
            results += (self.adapter.received_splits(inner.received_splits, results[0]),)
        elif not open_handle.many:
            (results,) = results
        self._open.pop(handle, None)
        return results

    # -- tensors in the arena ------------------------------------------------------------------------------------

    def zeros(self, *shape: Any, dtype: Any = None) -> Any:
        """Return a tensor of zeros in memory that all ranks of the host share.

        An in-place allreduce of this tensor copies nothing. The memory is freed with the tensor.

        Args:
            shape: dimensions, as numbers or one sequence.
            dtype: dtype of the framework; the framework's default when None.

        Raises:
            MemoryError: the arena is full.
            ValueError: the shape or the dtype does not exist.
        """
        dims = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        if not all(isinstance(dim, SupportsIndex) and operator.index(dim) >= 0 for dim in dims):
            raise ValueError(f"dimensions must be whole numbers, 0 or more. Received: {dims}")
        dims = tuple(map(operator.index, dims))
        name = dtype if isinstance(dtype, str) else self.adapter.dtype_name(dtype)
        if name not in ITEMSIZE:
            raise ValueError(f"dtype must be one of {', '.join(ITEMSIZE)}. Received: {name!r}")
        nbytes = ITEMSIZE[name]
        for dim in dims:
            nbytes *= dim
        memory = _engine().transport.allocate(max(nbytes, 1))
        if nbytes == 0:
            return self.adapter.wrap(self.adapter.empty(dims, name, self.adapter.over(memory, (1,), "uint8")))
        return self.adapter.wrap(self.adapter.over(memory, dims, name))

    #: The same function as ``zeros``: new memory of the arena is always zero.
    empty = zeros

    # -- the three steps -----------------------------------------------------------------------------------------

    def _start(self, call: Call, tensors: Sequence[Any], in_place: bool = False, many: bool = False) -> int:
        """Start an operation and return the number of its handle."""
        open_handle = self._submit(call, tensors, in_place, many)
        number = next(self._numbers)
        self._open[number] = open_handle
        return number

    def _start_into(self, call: Call, tensor: Any, output: Any) -> int:
        """Start an operation that writes its result to the caller's contiguous host memory; see ``_start``."""
        adapter = self.adapter
        handle = _engine().submit(call, adapter, [adapter.buffer(tensor)], [adapter.target(output)], None, False)
        number = next(self._numbers)
        self._open[number] = _Open(handle, False)
        return number

    def _run_one(self, call: Call, tensor: Any, in_place: bool = False) -> Any:
        """Run an operation on one tensor and return its result."""
        engine, adapter = _engine(), self.adapter
        buffer = self._target(tensor) if in_place else adapter.buffer(tensor)
        if buffer is None:
            return self._run_many(call, (tensor,), in_place)[0]
        # Fast path of the usual case.
        inputs = (buffer,)
        outputs = engine.run(call, adapter, inputs, inputs if in_place else None).outputs
        return tensor if in_place else adapter.wrap(outputs[0])

    def _run(self, call: Call, tensors: Sequence[Any], in_place: bool = False) -> list[Any]:
        """Run an operation and return its results."""
        if len(tensors) == 1:
            return [self._run_one(call, tensors[0], in_place)]
        return self._run_many(call, tensors, in_place)

    def _run_many(self, call: Call, tensors: Sequence[Any], in_place: bool) -> list[Any]:
        open_handle = self._submit(call, tensors, in_place, patient=True)
        return self._results(open_handle, _engine().wait(open_handle.handle))

    def _submit(
        self, call: Call, tensors: Sequence[Any], in_place: bool, many: bool = False, patient: bool = False
    ) -> _Open:
        engine, adapter = _engine(), self.adapter
        alias = self._target if in_place else adapter.buffer
        inputs: list[Any] = []
        copies: list[tuple[Any, Any]] = []
        for tensor in tensors:
            buffer = alias(tensor)
            if buffer is None:
                device = adapter.device(tensor)
                if device != "cpu":
                    return self._submit_from(call.on(device), tensors, in_place, many, patient)
                buffer = adapter.contiguous(tensor)
                copies.append((tensor, buffer))
            inputs.append(buffer)
        if not in_place:
            return _Open(engine.submit(call, adapter, inputs, None, None, patient), many)
        if len(inputs) > 1:
            self._part(inputs, copies, call.op)
        # Copy the list: the caller may change it before the operation is done.
        return _Open(engine.submit(call, adapter, inputs, inputs, None, patient), many, tuple(tensors), copies)

    def _checked_target(self, tensor: Any) -> Buffer | None:
        """Return the alias of a tensor for an in-place operation; see ``Adapter.target``."""
        if not self.adapter.writable:
            raise TypeError(f"a tensor of {self.adapter.name} cannot be written in place; use the operation without _")
        buffer = self.adapter.target(tensor)
        # The adapter may not check this, and a failing kernel would end the job.
        if buffer is not None and self.adapter.kernels == "numpy" and not buffer.flags.writeable:
            raise ValueError(
                f"a read-only tensor of {self.adapter.name} cannot be the target of an operation in place; use the "
                "operation without _, or copy the tensor first"
            )
        return buffer

    def _part(self, inputs: list[Any], copies: list[tuple[Any, Any]], op: ReduceOp) -> None:
        """Replace tensors of an in-place group that share memory, such as tied weights, by copies.

        Memory that two tensors share gets the same values from both.

        Raises:
            RequestError: the shared memory would get different values.
        """
        for index, other in find_overlaps([(self.adapter.address(i), i.nbytes) for i in inputs]).items():
            buffer, rival = inputs[index], inputs[other]
            places = (self.adapter.address(buffer), buffer.nbytes), (self.adapter.address(rival), rival.nbytes)
            if buffer.dtype != rival.dtype or (op is ReduceOp.ADASUM and places[0] != places[1]):
                raise RequestError(
                    f"tensors {min(index, other)} and {max(index, other)} of a group in place share memory, but their "
                    f"results differ there: {buffer.dtype} {tuple(buffer.shape)} and {rival.dtype} "
                    f"{tuple(rival.shape)}{' under Adasum' if op is ReduceOp.ADASUM else ''}; clone() one of them, or "
                    "use the operation without _"
                )
            inputs[index] = self.adapter.contiguous(buffer)
            if places[0] != places[1]:
                copies.append((buffer, inputs[index]))

    def _submit_from(self, call: Call, tensors: Sequence[Any], in_place: bool, many: bool, patient: bool) -> _Open:
        """Submit device tensors; they go through host memory unless the transport takes them directly."""
        engine, adapter = _engine(), self.adapter
        others = [device for tensor in tensors if (device := adapter.device(tensor)) != call.device]
        if others:
            raise RuntimeError(f"tensors of one group must be on one device, received {call.device} and {others[0]}")
        if not engine.transport.takes(call.device, call.kind, call.op, [adapter.dtype_name(t.dtype) for t in tensors]):
            stage = adapter.stage(tensors, tensors if in_place else None)
            outputs = stage.buffers if keeps_shape(call.kind) else None
            handle = engine.submit(call, adapter, stage.buffers, outputs, stage, patient)
            return _Open(handle, many, None, (), stage)
        passed = adapter.passed(tensors)
        inputs = list(passed.buffers)
        if not in_place:
            passed.begin()
            return _Open(engine.submit(call, adapter, inputs, None, passed, patient), many, None, (), passed)
        for tensor in tensors:
            adapter.target(tensor)  # raises if the tensor cannot be written
        both = zip(tensors, inputs, strict=True)
        copies = [(target, buffer) for target, buffer in both if adapter.address(target) != adapter.address(buffer)]
        if len(inputs) > 1:
            self._part(inputs, copies, call.op)
        passed.begin()
        return _Open(engine.submit(call, adapter, inputs, inputs, passed, patient), many, tuple(tensors), copies)

    def _results(self, open_handle: _Open, outputs: Sequence[Any]) -> list[Any]:
        if open_handle.passing is not None:
            return list(open_handle.passing.collect())
        if open_handle.targets is None:
            return [self.adapter.wrap(output) for output in outputs]
        for target, copy in open_handle.copies:
            self.adapter.write_back(target, copy)
        return list(open_handle.targets)


def _wait(handle: Handle) -> Sequence[Any]:
    if handle.done and handle.error is None:
        return handle.outputs
    return _engine().wait(handle)


def find_overlaps(places: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Return the indices of tensors to copy so that no two share a byte, each with the index of a kept rival.

    ``places`` are the address and number of bytes of each tensor.
    """
    moved: dict[int, int] = {}
    end = owner = -1
    for start, index in sorted((start, index) for index, (start, nbytes) in enumerate(places) if nbytes):
        if start < end:
            moved[index] = owner
        else:
            end, owner = start + places[index][1], index
    return moved


def id_of(process_set: ProcessSet) -> int:
    """Return the id of a registered process set.

    Raises:
        RequestError: ``process_set`` is not registered, or is not a process set.
    """
    if (key := id_or_none(process_set)) is None:
        raise RequestError(not_registered(process_set))
    return key
