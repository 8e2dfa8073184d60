"""One execution of a node: from TensorFlow's memory to the engine, and back.

Here a small collective spends most of its time, all of it in Python. So what is the same in all executions of a node is
kept in its ``Node``, and TensorFlow is asked for nothing twice.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import ctypes
import functools
import itertools
import math
import os
import queue
import threading
import time
from typing import Any

import numpy as np

from horovod import context
from horovod.core.requests import Kind
from horovod.engine.calls import Call, call
from horovod.engine.engine import Engine
from horovod.engine.handles import Handle
from horovod.tensorflow import failures
from horovod.tensorflow.adapter import DTYPES
from horovod.tensorflow.answers import answer
from horovod.tensorflow.callbacks import Callback
from horovod.tensorflow.library import lend_status, lib, quick, return_status
from horovod.tensorflow.requests import OP_TYPES, GraphRequest

__all__ = ["Node", "Run"]

Array = np.ndarray[Any, np.dtype[Any]]

_NUMBERS = {name: dtype.as_datatype_enum for name, dtype in DTYPES.items()}
_NUMPY = {dtype.as_datatype_enum: np.dtype(dtype.as_numpy_dtype) for dtype in DTYPES.values()}
# An attribute of an enum class costs more than a name, in every operation.
_ALLREDUCE, _BROADCAST, _ALLTOALL, _JOIN = Kind.ALLREDUCE, Kind.BROADCAST, Kind.ALLTOALL, Kind.JOIN
_get_input, _delete_tensor, _data = quick.TF_GetInput, quick.TF_DeleteTensor, quick.TF_TensorData
_count_dims, _dim = quick.TF_NumDims, quick.TF_Dim
_forward = lib.TF_ForwardInputOrAllocateOutput
#: How long a kernel may keep its thread, where that has paid: to hand a small result over takes longer than to wait.
_LINGER_S = 0.005
#: How many places of a tensor are remembered.
_MOST_KNOWN = 8
#: A node that runs while its last run is still in flight, as in a loop, waits for it here; empty where none waits.
_behind: dict[tuple[int, int, str], collections.deque[Run] | None] = {}
_behind_lock = threading.Lock()


@functools.cache
def _candidates(index: int) -> Any:
    return (ctypes.c_int * 1)(index)


class _Finisher:
    """The thread that ends operations; it is started by the first one."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Run] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, run: Run) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="horovod-tensorflow", daemon=True)
            self._thread.start()
        self._queue.put(run)

    def _loop(self) -> None:
        while True:
            self._queue.get().finish()


_finisher = _Finisher()


def _after_fork() -> None:
    global _finisher
    _finisher = _Finisher()
    _behind.clear()


os.register_at_fork(after_in_child=_after_fork)


class _Layout:
    """What a tensor of a node looks like, and arrays over the places where such have been.

    Nobody looks into these arrays but while there is a tensor.

    Args:
        shape: its shape.
        kind: of its elements.
    """

    __slots__ = ("_known", "_memory", "dims", "kind", "nbytes", "shape")

    def __init__(self, shape: tuple[int, ...], kind: np.dtype[Any]) -> None:
        self.shape = shape
        self.kind = kind
        self.dims = (ctypes.c_int64 * len(shape))(*shape)
        self.nbytes = nbytes = math.prod(shape) * kind.itemsize
        self._memory: Any = ctypes.c_char * nbytes if nbytes else None
        self._known: dict[int | None, Array] = {}

    def over(self, address: int | None) -> Array:
        """Return an array over memory of TensorFlow's, which often gives the same again: then the same array."""
        array = self._known.get(address)
        if array is None:
            memory = self._memory.from_address(address) if self._memory is not None and address else None
            array = np.ndarray(self.shape, self.kind, memory)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[address] = array
        return array


class Node:
    """One node of a graph, ready to run.

    Args:
        op_type: Horovod's name of the operation.
        request: the settings.
    """

    def __init__(self, op_type: str, request: GraphRequest) -> None:
        self.op_type = op_type
        self.kind = kind = OP_TYPES.get(op_type)
        self.request = request
        self.as_user = request.site.stand_in()
        self.key = (-1 if kind is None else int(kind), request.process_set, request.name)
        self.in_place = kind is _ALLREDUCE or kind is _BROADCAST
        self.call = None if kind is None else self.call_with(())
        self._count = -1
        self._layouts: dict[int, _Layout] = {}
        self._in_vain = 0
        self._runs = 0

    def call_with(self, splits: tuple[int, ...]) -> Call:
        """Return what is asked of the engine, with the splits of an alltoall."""
        assert self.kind is not None
        if self.kind is _JOIN:
            return Call(self.kind, "join")
        r = self.request
        return call(self.kind, r.name, r.process_set, r.op, r.prescale, r.postscale, r.root, splits)

    def count_inputs(self, context_: int) -> int:
        """Return how many inputs there are.

        Args:
            context_: TensorFlow's context of an execution.
        """
        if self._count < 0:
            self._count = int(lib.TF_NumInputs(context_))
        return self._count

    def layout(self, index: int, tensor: ctypes.c_void_p) -> _Layout:
        """Return what an input looks like: most often the same as last time."""
        shape = tuple([_dim(tensor, dim) for dim in range(_count_dims(tensor))])
        layout = self._layouts.get(index)
        if layout is None or layout.shape != shape:
            layout = self._layouts[index] = _Layout(shape, _NUMPY[lib.TF_TensorType(tensor)])
        return layout

    def lingers(self) -> bool:
        """Whether the next run should look for its result for a moment: not where that has been in vain lately."""
        self._runs += 1
        return not self._in_vain or self._runs % (1 << min(self._in_vain, 6)) == 0

    def lingered(self, paid: bool) -> None:
        """Note whether the result came meanwhile."""
        self._in_vain = 0 if paid else self._in_vain + 1


class Run:
    """One execution of a node; also the allocator of its results.

    Args:
        node: what runs.
        context_: TensorFlow's context of the execution.
        done: TensorFlow's callback; see ``callbacks``.
    """

    __slots__ = (
        "_context", "_done", "_error", "_handle", "_inputs", "_is_interrupted", "_node", "_once", "_outputs",
        "_tensors", "_waits_behind",
    )  # fmt: skip
    kernels = "numpy"
    writable = True

    def __init__(self, node: Node, context_: int, done: int) -> None:
        self._node = node
        self._context = context_
        self._done = Callback(done)
        self._inputs: list[Array] = []
        self._outputs: list[Array] = []
        self._tensors: list[int] = []
        self._handle: Handle | None = None
        self._error: BaseException | None = None
        self._waits_behind = False
        self._is_interrupted = False
        self._once: itertools.count[int] | None = None

    # -- the engine's side ---------------------------------------------------------------------------------------

    def address(self, buffer: Array) -> int:
        """Return where an array lies."""
        return buffer.ctypes.data

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Array:
        """Return an array over the next output, made now."""
        index = len(self._outputs)
        layout, status = _Layout(shape, _NUMPY[_NUMBERS[dtype]]), lend_status()
        tensor = lib.TF_AllocateOutput(
            self._context, index, _NUMBERS[dtype], layout.dims, len(shape), layout.nbytes, status.pointer
        )
        status.check()
        return_status(status)
        self._tensors.append(tensor)
        array = layout.over(_data(tensor))
        self._outputs.append(array)
        return array

    def release(self) -> None:
        """Be told that the handle is done, as a lock is; more than once, maybe."""
        if self._once is None or next(self._once) == 0:
            _finisher.put(self)

    # -- TensorFlow's side ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Submit, or finish at once what needs no other rank; stay only where the callback would not survive it."""
        self._begin()
        self._done.stay()

    def _begin(self) -> None:
        node = self._node
        try:
            if node.kind is None:
                self._answer(answer(node.op_type, node.request.process_set))
            elif node.request.name and self._must_wait():
                return
            else:
                self._submit()
                return
        except BaseException as error:
            self._error = error
        self.finish()

    def _must_wait(self) -> bool:
        key = self._node.key
        with _behind_lock:
            if key not in _behind:
                _behind[key] = None
                self._waits_behind = True
                return False
            waiting = _behind[key]
            if waiting is None:
                waiting = _behind[key] = collections.deque()
            waiting.append(self)
            return True

    def run_on(self) -> None:
        """Submit what had to wait for an earlier run of its node."""
        self._waits_behind = True
        try:
            self._submit()
        except BaseException as error:
            self._error = error
            self.finish()

    def _submit(self) -> None:
        engine, node = context.engine(), self._node
        what, count = node.call, node.count_inputs(self._context)
        self._take_inputs(count)
        if node.kind is _ALLTOALL:
            splits = self._inputs.pop()
            if not node.request.even:
                what = node.call_with(tuple(splits.tolist()))
        outputs = self._outputs if node.in_place else None if count else ()
        lingers = node.lingers()
        assert what is not None
        submit = functools.partial(engine.submit, what, self, self._inputs, outputs, None, lingers)
        self._handle = handle = node.as_user(submit)
        if engine.size == 1:
            with contextlib.suppress(Exception):  # the handle keeps it
                engine.wait(handle)
            self.finish()
            return
        if lingers and self._linger(engine, handle):
            self.finish()
            return
        self._once = itertools.count()
        handle.waiters.append(self)
        if handle.done:
            self.release()

    def _linger(self, engine: Engine, handle: Handle) -> bool:
        until = time.monotonic() + _LINGER_S
        try:
            done = engine.linger(handle, _LINGER_S)
        except BaseException:
            # An interrupt, on the main thread. The engine has the memory until it is done; then it comes again.
            self._is_interrupted = True
            return False
        # What takes longer leaves this thread to computing, although it is done.
        self._node.lingered(done and time.monotonic() < until)
        return done

    def _take_inputs(self, count: int) -> None:
        node, context_, status = self._node, self._context, lend_status()
        for index in range(count):
            # The index is right, so this cannot fail.
            tensor = ctypes.c_void_p()
            _get_input(context_, index, tensor, status.pointer)
            layout = node.layout(index, tensor)
            array = layout.over(_data(tensor))
            # TensorFlow keeps the input until the operation is done; what is dropped here is one reference to it, so
            # that the input can become the output.
            _delete_tensor(tensor)
            if node.in_place:
                forwarded = ctypes.c_int(-1)
                made = _forward(context_, _candidates(index), 1, index, layout.dims, len(layout.shape), forwarded,
                                status.pointer)  # fmt: skip
                if not made:
                    status.check()
                self._tensors.append(made)
                output = layout.over(_data(made))
                self._outputs.append(output)
                if forwarded.value >= 0:
                    array = output
            self._inputs.append(array)
        return_status(status)

    def _answer(self, number: int) -> None:
        self.empty((), "int32", None)[...] = number

    def finish(self) -> None:
        """Tell TensorFlow how it went."""
        error, handle, kind = self._error, self._handle, self._node.kind
        try:
            if error is None and handle is not None:
                error = handle.error
                if error is None and kind is _ALLTOALL:
                    received = handle.received_splits
                    self.empty((len(received),), "int32", None)[...] = received
                elif error is None and kind is _JOIN:
                    self._answer(handle.result)
        except BaseException as late:
            error = late
        if error is not None:
            status = lend_status()
            lib.TF_SetStatus(status.pointer, failures.code_of(error), _text(error).encode())
            lib.TF_OpKernelContext_Failure(self._context, status.pointer)
        for tensor in self._tensors:
            _delete_tensor(tensor)
        self._handle = None
        self._inputs, self._outputs = [], []
        following = self._next_behind() if self._waits_behind else None
        if self._is_interrupted:
            _thread.interrupt_main()
        self._done()
        if following is not None:
            following.run_on()

    def _next_behind(self) -> Run | None:
        key = self._node.key
        with _behind_lock:
            waiting = _behind.get(key)
            if not waiting:
                _behind.pop(key, None)
                return None
            return waiting.popleft()


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
