"""The kernels of the operations in graphs: they hand TensorFlow's memory to the engine and wait for nobody.

A kernel submits, and returns to the executor; when the engine has the result, a thread of this module tells
TensorFlow that the operation is done. So no thread of TensorFlow's pools ever waits for another rank: any number of
collectives may be in flight, in any order, with one inter-op thread.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import ctypes
import functools
import itertools
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
from horovod.tensorflow.callbacks import Callback
from horovod.tensorflow.library import (
    COMPUTE,
    CREATE,
    DELETE,
    Status,
    attribute,
    define_op,
    immortal,
    lib,
    register_kernel,
)
from horovod.tensorflow.requests import OP_TYPES, QUERIES, GraphRequest

__all__ = ["answer", "register"]

Array = np.ndarray[Any, np.dtype[Any]]

_NUMBERS = {name: dtype.as_datatype_enum for name, dtype in DTYPES.items()}
_NUMPY = {dtype.as_datatype_enum: np.dtype(dtype.as_numpy_dtype) for dtype in DTYPES.values()}
#: How long a kernel may keep its thread, where that has paid: to hand a small result over takes longer than to wait.
_LINGER_S = 0.005
#: Kernels that exist, by the number that TensorFlow knows them by.
_kernels: dict[int, _Kernel] = {}
_ids = itertools.count(1)
#: A node that runs while its last run is still in flight, as in a loop, waits for it here.
_behind: dict[tuple[int, int, str], collections.deque[_Run]] = {}
_behind_lock = threading.Lock()


class _Finisher:
    """The thread that ends operations; it is started by the first one."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Run] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, run: _Run) -> None:
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


class _Kernel:
    """One node of a graph, ready to run."""

    def __init__(self, op_type: str, request: GraphRequest) -> None:
        self.op_type = op_type
        self.kind = OP_TYPES.get(op_type)
        self.request = request
        self.as_user = request.site.stand_in()
        self.key = (-1 if self.kind is None else int(self.kind), request.process_set, request.name)
        self._in_vain = 0
        self._runs = 0

    def lingers(self) -> bool:
        """Whether the next run should look for its result for a moment: not where that has been in vain lately."""
        self._runs += 1
        return self._runs % (1 << min(self._in_vain, 6)) == 0

    def lingered(self, paid: bool) -> None:
        """Note whether the result came meanwhile."""
        self._in_vain = 0 if paid else self._in_vain + 1


def answer(op_type: str, process_set: int) -> int:
    """Return what an operation of ``QUERIES`` tells about this process."""
    if op_type == "HorovodProcessSetIncluded" and not context.is_initialized():
        return -1
    world = context.world()
    if op_type == "HorovodProcessSetIncluded":
        members = context.engine().sets.as_dict()
        return int(world.rank in members[process_set]) if process_set in members else -3
    if op_type == "HorovodSize":
        return len(context.engine().sets.as_dict()[process_set]) if process_set else world.size
    return {
        "HorovodRank": world.rank,
        "HorovodLocalRank": world.local_rank,
        "HorovodLocalSize": world.local_size,
    }[op_type]


class _Run:
    """One execution of a kernel; also the allocator of its results.

    Args:
        kernel: what runs.
        context_: TensorFlow's context of the execution.
        done: TensorFlow's callback; see ``callbacks``.
    """

    kernels = "numpy"
    writable = True

    def __init__(self, kernel: _Kernel, context_: int, done: int) -> None:
        self._kernel = kernel
        self._context = context_
        self._done = Callback(done)
        self._status = Status()
        self._inputs: list[Array] = []
        self._outputs: list[Array] = []
        self._tensors: list[int] = []
        self._handle: Handle | None = None
        self._error: BaseException | None = None
        self._waits_behind = False
        self._is_interrupted = False
        self._once = itertools.count()

    # -- the engine's side ---------------------------------------------------------------------------------------

    def address(self, buffer: Array) -> int:
        return buffer.ctypes.data

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Array:
        index = len(self._outputs)
        dims = (ctypes.c_int64 * len(shape))(*shape)
        kind = _NUMPY[_NUMBERS[dtype]]
        nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        tensor = lib.TF_AllocateOutput(
            self._context, index, _NUMBERS[dtype], dims, len(shape), nbytes, self._status.pointer
        )
        self._status.check()
        return self._keep_output(tensor, shape, kind)

    def _keep_output(self, tensor: int, shape: tuple[int, ...], kind: np.dtype[Any]) -> Array:
        self._tensors.append(tensor)
        array = _array(lib.TF_TensorData(tensor), shape, kind)
        self._outputs.append(array)
        return array

    # What the engine releases when the handle is done, in place of a lock.

    def locked(self) -> bool:
        return True

    def release(self) -> None:
        if next(self._once) == 0:
            _finisher.put(self)

    # -- TensorFlow's side ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Submit, or finish at once what needs no other rank; stay only where the callback would not survive it."""
        self._begin()
        self._done.stay()

    def _begin(self) -> None:
        try:
            if self._kernel.kind is None:
                self._answer(answer(self._kernel.op_type, self._kernel.request.process_set))
            elif self._kernel.request.name and self._must_wait():
                return
            else:
                self._submit()
                return
        except BaseException as error:
            self._error = error
        self.finish()

    def _must_wait(self) -> bool:
        with _behind_lock:
            waiting = _behind.get(self._kernel.key)
            if waiting is None:
                _behind[self._kernel.key] = collections.deque()
                self._waits_behind = True
                return False
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
        engine, request, kind = context.engine(), self._kernel.request, self._kernel.kind
        assert kind is not None
        splits: tuple[int, ...] = ()
        count = 1 if kind is Kind.ALLTOALL else lib.TF_NumInputs(self._context)
        in_place = kind in (Kind.ALLREDUCE, Kind.BROADCAST)
        for index in range(count):
            self._take_input(index, in_place)
        if kind is Kind.ALLTOALL and not request.even:
            splits = self._splits(self._view(1))
        what = call(
            kind,
            request.name,
            request.process_set,
            request.op,
            request.prescale,
            request.postscale,
            request.root,
            splits,
        )
        if kind is Kind.JOIN:
            what = Call(kind, "join")
        outputs = self._outputs if in_place else None if count else ()
        lingers = self._kernel.lingers()
        submit = functools.partial(engine.submit, what, self, self._inputs, outputs, None, lingers)
        handle: Handle = self._kernel.as_user(submit)
        self._handle = handle
        if engine.size == 1:
            with contextlib.suppress(Exception):  # the handle keeps it
                engine.wait(handle)
            self.finish()
            return
        if lingers and self._linger(engine, handle):
            self.finish()
            return
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
        self._kernel.lingered(done and time.monotonic() < until)
        return done

    def _splits(self, array: Array) -> tuple[int, ...]:
        return tuple(int(split) for split in array)

    def _view(self, index: int) -> Array:
        tensor = ctypes.c_void_p()
        lib.TF_GetInput(self._context, index, tensor, self._status.pointer)
        self._status.check()
        shape = tuple([lib.TF_Dim(tensor, dim) for dim in range(lib.TF_NumDims(tensor))])
        array = _array(lib.TF_TensorData(tensor), shape, _NUMPY[lib.TF_TensorType(tensor)])
        # TensorFlow keeps the input until the operation is done; what is dropped here is one reference to it, so
        # that the input can become the output.
        lib.TF_DeleteTensor(tensor)
        return array

    def _take_input(self, index: int, in_place: bool) -> None:
        array = self._view(index)
        if in_place:
            candidates, forwarded = (ctypes.c_int * 1)(index), ctypes.c_int(-1)
            dims = (ctypes.c_int64 * array.ndim)(*array.shape)
            tensor = lib.TF_ForwardInputOrAllocateOutput(
                self._context, candidates, 1, index, dims, array.ndim, forwarded, self._status.pointer
            )
            self._status.check()
            output = self._keep_output(tensor, array.shape, array.dtype)
            if forwarded.value >= 0:
                array = output
        self._inputs.append(array)

    def _answer(self, number: int) -> None:
        self.empty((), "int32", None)[...] = number

    def finish(self) -> None:
        """Tell TensorFlow how it went."""
        error = self._error
        try:
            if error is None and self._handle is not None:
                error = self._handle.error
                if error is None and self._kernel.kind is Kind.ALLTOALL:
                    received = self._handle.received_splits
                    self.empty((len(received),), "int32", None)[...] = received
                elif error is None and self._kernel.kind is Kind.JOIN:
                    self._answer(self._handle.result)
        except BaseException as late:
            error = late
        if error is not None:
            lib.TF_SetStatus(self._status.pointer, failures.code_of(error), _text(error).encode())
            lib.TF_OpKernelContext_Failure(self._context, self._status.pointer)
        for tensor in self._tensors:
            lib.TF_DeleteTensor(tensor)
        self._handle = None
        self._inputs, self._outputs = [], []
        following = self._next_behind() if self._waits_behind else None
        if self._is_interrupted:
            _thread.interrupt_main()
        self._done()
        if following is not None:
            following.run_on()

    def _next_behind(self) -> _Run | None:
        with _behind_lock:
            waiting = _behind.get(self._kernel.key)
            if not waiting:
                _behind.pop(self._kernel.key, None)
                return None
            return waiting.popleft()


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _array(address: int | None, shape: tuple[int, ...], kind: np.dtype[Any]) -> Array:
    nbytes = kind.itemsize
    for dim in shape:
        nbytes *= dim
    if not nbytes or not address:
        return np.empty(shape, kind)
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    array: Array = np.ndarray(shape, kind, memory)
    return array


def _create(op_type: str, construction: int) -> int:
    try:
        request = GraphRequest.decode(attribute(construction, b"request"))
        key = next(_ids)
        _kernels[key] = _Kernel(op_type, request)
        return key
    except Exception:
        return 0


@COMPUTE
def _compute(key: int, context_: int, done: int) -> None:
    _Run(_kernels[key], context_, done).start()


@DELETE
def _delete(key: int, kernels: dict[int, _Kernel] = _kernels) -> None:
    # TensorFlow lets go of graphs when Python has cleared the names of this module already.
    kernels.pop(key, None)


def register() -> None:
    """Make the operations known to TensorFlow; once per process."""
    for name in (*OP_TYPES, *QUERIES):
        define_op(
            name,
            (f"T: list({{{_SPEC}}}) >= 0", f"U: list({{{_SPEC}}}) >= 0", "request: string"),
            ("tensors: T",),
            ("outputs: U",),
        )
        creator = CREATE(lambda construction, op_type=name: _create(op_type, construction))
        register_kernel(name, immortal(creator), immortal(_compute), immortal(_delete))


_SPEC = ", ".join({"float32": "float", "float64": "double", "float16": "half"}.get(name, name) for name in DTYPES)
