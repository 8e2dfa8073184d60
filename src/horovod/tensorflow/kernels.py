"""Kernels of graph operations: they pass TensorFlow's memory to the engine and return the results.

A kernel submits and returns to the executor; when the engine has the result, another thread tells TensorFlow that
the operation is done. So no thread of TensorFlow's pools waits for another rank: even with one inter-op thread, any
number of collectives can be in flight, in any order. Only for little data a kernel waits briefly: the two extra
thread switches make a training step of a small model a fifth longer.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from horovod import context
from horovod.bindings.failures import remember
from horovod.bindings.numpy_adapter import NumpyAdapter
from horovod.core.collectives import keeps_shape
from horovod.core.requests import Kind
from horovod.engine.calls import Call, call
from horovod.engine.handles import Handle
from horovod.errors import RequestError
from horovod.tensorflow.adapter import DTYPES
from horovod.tensorflow.failures import code_of
from horovod.tensorflow.library import (
    COMPUTE,
    CREATE,
    DELETE,
    Status,
    attribute,
    attribute_size,
    define_op,
    immortal,
    lib,
    quick,
    register_kernel,
)
from horovod.tensorflow.requests import OP_TYPES, QUERIES, GraphRequest
from horovod.tensorflow.unsafe import Callback, remember_thread

__all__ = ["Node", "answer", "over", "register"]

Array = np.ndarray[Any, np.dtype[Any]]
_P = ctypes.c_void_p
#: TensorFlow's enum values of the engine's dtypes, and the numpy dtypes of these values.
_NUMBERS: dict[str, int] = {name: dtype.as_datatype_enum for name, dtype in DTYPES.items()}
_NUMPY = {dtype.as_datatype_enum: np.dtype(dtype.as_numpy_dtype) for dtype in DTYPES.values()}
#: Seconds for which a kernel waits, for data of at most this many bytes.
_WAIT_S, _WAIT_NBYTES = 0.001, 1 << 20


def answer(op_type: str, process_set: int) -> int:
    """Return the result of a query.

    Raises:
        NotInitializedError: ``init()`` was not called.
        RequestError: the process set does not exist.
    """
    if op_type == "HorovodProcessSetIncluded" and not context.is_initialized():
        return -1
    world, sets = context.world(), context.engine().sets.as_dict()
    if op_type == "HorovodProcessSetIncluded":
        return int(world.rank in sets[process_set]) if process_set in sets else -3
    if op_type == "HorovodSize" and process_set not in sets:
        raise RequestError(f"size_op: process set {process_set} does not exist; was it removed?")
    return {
        "HorovodSize": len(sets.get(process_set, ())),
        "HorovodRank": world.rank,
        "HorovodLocalRank": world.local_rank,
        "HorovodLocalSize": world.local_size,
    }[op_type]


def over(address: int | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array over memory of TensorFlow's."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes or not address:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    array: Array = np.ndarray(shape, dtype, memory)
    return array


def _fail(report: Callable[..., None], place: int, error: BaseException) -> None:
    """Report an error to TensorFlow by the C function for this place, a kernel's construction or a run of it."""
    status = Status()
    lib.TF_SetStatus(status.pointer, code_of(error), f"{type(error).__name__}: {error}".encode())
    report(place, status.pointer)


class Node:
    """A node of a graph, ready to run; ``count`` is its number of inputs."""

    def __init__(self, op_type: str, request: GraphRequest, count: int) -> None:
        self.op_type, self.request, self.count = op_type, request, count
        self.kind = OP_TYPES.get(op_type)
        self.key = (op_type, request.process_set, request.name)
        self.in_place = self.kind is not None and keeps_shape(self.kind)
        self.as_user = request.site.stand_in()

    def call(self, splits: tuple[int, ...]) -> Call:
        """Return the operation for the engine."""
        assert self.kind is not None
        if self.kind is Kind.JOIN:
            return Call(self.kind, "join")
        r = self.request
        return call(self.kind, r.name, r.process_set, r.op, r.prescale, r.postscale, r.root, splits, parts=r.parts)


@functools.cache
def _finisher() -> queue.SimpleQueue[_Run]:
    """Return the queue of the thread that completes operations; the first call starts it."""
    done: queue.SimpleQueue[_Run] = queue.SimpleQueue()

    def finish() -> None:
        while True:
            done.get().finish()

    threading.Thread(target=finish, name="horovod-tensorflow", daemon=True).start()
    return done


#: Queues of executions with one key, from a loop or several threads; the first of each queue is in flight.
_queues: dict[tuple[str, int, str], deque[_Run]] = {}
_lock = threading.Lock()


def _after_fork() -> None:
    _finisher.cache_clear()
    _queues.clear()


os.register_at_fork(after_in_child=_after_fork)


class _Run:
    """One execution of a node; also the allocator of its results."""

    kernels = NumpyAdapter.kernels
    address = NumpyAdapter.address

    def __init__(self, node: Node, context_: int, done: int) -> None:
        self._node, self._context, self._done = node, context_, Callback(done)
        self._inputs: list[Array] = []
        self._outputs: list[Array] = []
        self._tensors: list[int] = []
        self._handle: Handle | None = None
        self._error: BaseException | None = None
        self._released = itertools.count()

    # -- the engine's side ---------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Array:
        """Allocate the next output, and return an array over it."""
        status, number, kind = Status(), _NUMBERS[dtype], _NUMPY[_NUMBERS[dtype]]
        dims = (ctypes.c_int64 * len(shape))(*shape)
        nbytes = math.prod(shape) * kind.itemsize
        index = len(self._outputs)
        tensor = lib.TF_AllocateOutput(self._context, index, number, dims, len(shape), nbytes, status.pointer)
        status.check()
        return self._keep(tensor, shape, kind)

    def release(self) -> None:
        """Complete the operation; called when the handle is done, possibly twice."""
        if next(self._released) == 0:
            _finisher().put(self)

    def _release_if_done(self, handle: Handle) -> None:
        if handle.done:
            self.release()

    # -- TensorFlow's side ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Submit, or wait in the queue of the key."""
        with _lock:
            waiting = _queues.setdefault(self._node.key, deque()) if self._node.request.name else deque()
            waiting.append(self)
            is_first = len(waiting) == 1
        if is_first:
            self.go_on()
        self._done.stay()

    def go_on(self) -> None:
        """Submit; finish immediately if this fails, or if the result needs no other rank."""
        try:
            if self._node.kind is None:
                self._answer(answer(self._node.op_type, self._node.request.process_set))
            else:
                self._handle = handle = self._submit()
                if not handle.done:
                    handle.waiters.append(self)
                    self._release_if_done(handle)
                    return
        except BaseException as error:
            self._error = error
        self.finish()

    def _submit(self) -> Handle:
        engine, node = context.engine(), self._node
        for index in range(node.count):
            self._take_input(index)
        splits: tuple[int, ...] = ()
        if node.kind is Kind.ALLTOALL:
            given = self._inputs.pop()
            splits = () if node.request.even else tuple(given.tolist())
        outputs = self._outputs if node.in_place else None if node.count else ()
        what = node.call(splits), self, self._inputs, outputs
        if threading.current_thread() is threading.main_thread():
            # Submit without blocking: after an interrupt we still need the handle, because the engine holds the memory.
            handle: Handle = node.as_user(functools.partial(engine.submit, *what, None, True))
            if engine.size == 1:
                engine.wait(handle)
            else:
                engine.poll(handle)
            return handle
        is_small = sum(array.nbytes for array in self._inputs) <= _WAIT_NBYTES
        limit_s = math.inf if engine.size == 1 else _WAIT_S if is_small else 0.0
        if limit_s:
            handle = node.as_user(functools.partial(engine.run, *what, None, limit_s))
        else:
            handle = node.as_user(functools.partial(engine.submit, *what, None, True))
            engine.poll(handle)  # wake the engine's thread now
        return handle

    def _take_input(self, index: int) -> None:
        status, tensor = Status(), _P()
        quick.TF_GetInput(self._context, index, ctypes.byref(tensor), status.pointer)
        status.check()
        shape = tuple([quick.TF_Dim(tensor, dim) for dim in range(quick.TF_NumDims(tensor))])
        kind = _NUMPY[quick.TF_TensorType(tensor)]
        array = over(quick.TF_TensorData(tensor), shape, kind)
        # TensorFlow keeps the input until the operation is done. Drop our reference, so that it can become the output.
        quick.TF_DeleteTensor(tensor)
        if self._node.in_place:
            dims, candidate, forwarded = (ctypes.c_int64 * len(shape))(*shape), ctypes.c_int(index), ctypes.c_int()
            made = quick.TF_ForwardInputOrAllocateOutput(
                self._context, ctypes.byref(candidate), 1, index, dims, len(shape), ctypes.byref(forwarded),
                status.pointer,
            )  # fmt: skip
            status.check()
            output = self._keep(made, shape, kind)
            array = output if forwarded.value >= 0 else array
        self._inputs.append(array)

    def _keep(self, tensor: int, shape: tuple[int, ...], kind: np.dtype[Any]) -> Array:
        self._tensors.append(tensor)
        self._outputs.append(over(quick.TF_TensorData(tensor), shape, kind))
        return self._outputs[-1]

    def _answer(self, number: int) -> None:
        self.empty((), "int32", None)[...] = number

    def finish(self) -> None:
        """Report the outcome to TensorFlow, and start the next execution with this key."""
        error, handle, kind = self._error, self._handle, self._node.kind
        try:
            if error is None and handle is not None:
                error = handle.error
                if error is None and kind is Kind.ALLTOALL:
                    received = handle.received_splits
                    self.empty((len(received),), "int32", None)[...] = received
                elif error is None and kind is Kind.JOIN:
                    self._answer(handle.result)
                    context.count_join()
        except BaseException as late:
            error = late
        if error is not None:
            remember(error)
            _fail(lib.TF_OpKernelContext_Failure, self._context, error)
        for tensor in self._tensors:
            quick.TF_DeleteTensor(tensor)
        self._handle = None
        self._inputs, self._outputs = [], []
        following = self._following()
        self._done()
        if following is not None:
            following.go_on()

    def _following(self) -> _Run | None:
        with _lock:
            if (waiting := _queues.get(self._node.key)) is None or not self._node.request.name:
                return None
            waiting.popleft()
            if waiting:
                return waiting[0]
            del _queues[self._node.key]
            return None


_nodes: dict[int, Node] = {}
_ids = itertools.count(1)


def _create(op_type: str, construction: int) -> int:
    try:
        request = GraphRequest.decode(attribute(construction, b"request"))
        key = next(_ids)
        _nodes[key] = Node(op_type, request, attribute_size(construction, b"T"))
        return key
    except Exception as error:  # such as of a graph that another version of khorovod has saved
        _fail(lib.TF_OpKernelConstruction_Failure, construction, error)
        return 0


@COMPUTE
def _compute(key: int, context_: int, done: int) -> None:
    remember_thread()
    _Run(_nodes[key], context_, done).start()


@DELETE
def _delete(key: int, nodes: dict[int, Node] = _nodes) -> None:
    # ``nodes`` is a default argument because TensorFlow deletes graphs after Python has cleared this module's names.
    nodes.pop(key, None)


def register() -> None:
    """Register the operations with TensorFlow; call it once per process."""
    types = ", ".join({"float32": "float", "float64": "double", "float16": "half"}.get(name, name) for name in DTYPES)
    for name in (*OP_TYPES, *QUERIES):
        define_op(
            name,
            (f"T: list({{{types}}}) >= 0", f"U: list({{{types}}}) >= 0", "N: int >= 0", "request: string"),
            ("tensors: T", "order: N * resource"),
            ("outputs: U",),
        )
        creator = CREATE(lambda construction, op_type=name: _create(op_type, construction))
        register_kernel(name, immortal(creator), immortal(_compute), immortal(_delete))
