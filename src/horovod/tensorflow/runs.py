"""One execution of a node: from TensorFlow's memory to the engine, and back.

Here a small collective spends most of its time, all of it in Python. So what is the same in all executions of a node is
kept in its ``Node``, and TensorFlow is asked for nothing twice.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import functools
import itertools
import os
import queue
import threading
import time
from _thread import get_ident
from typing import Any

from horovod import context
from horovod.core.requests import Kind
from horovod.engine.engine import Engine
from horovod.engine.handles import Handle
from horovod.tensorflow import callbacks, failures
from horovod.tensorflow.answers import answer
from horovod.tensorflow.callbacks import Callback
from horovod.tensorflow.library import lend_status, lib, quick, return_status
from horovod.tensorflow.prepared import DTYPE_NUMBERS, NUMPY_DTYPES, Array, Layout, Node

__all__ = ["Run"]

# An attribute of an enum class costs more than a name, in every operation.
_ALLTOALL, _JOIN = Kind.ALLTOALL, Kind.JOIN
_get_input, _delete_tensor, _data = quick.TF_GetInput, quick.TF_DeleteTensor, quick.TF_TensorData
_forward = quick.TF_ForwardInputOrAllocateOutput
_end = lib.TF_RunAsyncOpKernelDoneCallback
#: How long a kernel may keep its thread, where that has paid: to hand a small result over takes longer than to wait.
_LINGER_S = 0.005
#: A node that runs while its last run is still in flight, as in a loop, waits for it here; empty where none waits.
_behind: dict[tuple[int, int, str], collections.deque[Run] | None] = {}
_behind_lock = threading.Lock()


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


class Run:
    """One execution of a node; also the allocator of its results.

    Args:
        node: what runs.
        context_: TensorFlow's context of the execution.
        done: TensorFlow's callback; see ``callbacks``.
    """

    __slots__ = (
        "_context", "_done", "_error", "_handle", "_inputs", "_is_interrupted", "_kept", "_node", "_once", "_outputs",
        "_tensors", "_waits_behind",
    )  # fmt: skip
    kernels = "numpy"
    writable = True

    def __init__(self, node: Node, context_: int, done: int) -> None:
        self._node = node
        self._context = context_
        self._done = done
        # The first of all shows how callbacks lie in memory.
        self._kept = Callback(done) if callbacks.known_layout.is_known is None else None
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
        layout, status = Layout(shape, NUMPY_DTYPES[DTYPE_NUMBERS[dtype]]), lend_status()
        tensor = lib.TF_AllocateOutput(
            self._context, index, DTYPE_NUMBERS[dtype], layout.dims, len(shape), layout.nbytes, status.pointer
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
        if self._kept is not None:
            self._kept.stay()

    def _keep(self) -> None:
        """See to it that TensorFlow's callback outlives this call of the kernel, before another thread calls it."""
        if self._kept is None:
            self._kept = Callback(self._done)

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
            self._keep()
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
        what, count = node.call, node.count
        self._take_inputs(count)
        if node.kind is _ALLTOALL:
            splits = self._inputs.pop()
            if not node.request.even:
                what = node.call_with(tuple(splits.tolist()))
        outputs = self._outputs if node.in_place else None if count else ()
        lingers = node.lingers()
        assert what is not None
        if lingers and engine.size > 1 and get_ident() != threading.main_thread().ident:
            # Nothing can break into this thread, so that one step of the engine's will do.
            began = time.monotonic()
            run = functools.partial(engine.run, what, self, self._inputs, outputs, None, _LINGER_S)
            self._handle = handle = node.as_user(run)
            node.lingered(handle.done and time.monotonic() - began < _LINGER_S)
            if handle.done:
                self.finish()
            else:
                self._wait_for(handle)
            return
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
        self._wait_for(handle)

    def _wait_for(self, handle: Handle) -> None:
        self._keep()
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
            _get_input(context_, index, status.tensor_place, status.pointer)
            tensor = status.tensor.value
            layout = node.layout(index, tensor)
            array = layout.over(_data(tensor))
            # TensorFlow keeps the input until the operation is done; what is dropped here is one reference to it, so
            # that the input can become the output.
            _delete_tensor(tensor)
            if node.in_place:
                made = _forward(context_, node.candidate(index), 1, index, layout.dims_place, len(layout.shape),
                                status.index_place, status.pointer)  # fmt: skip
                if not made:
                    status.check()
                self._tensors.append(made)
                output = layout.over(_data(made))
                self._outputs.append(output)
                if status.index.value >= 0:
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
        if self._kept is None:
            _end(self._done)
        else:
            self._kept()
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
