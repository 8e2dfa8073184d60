"""All code that depends on TensorFlow internals. Each part checks for them first, and has a fallback.

Callback                moves a std::function out of the kernel call; else kernels block until the operation is done
let_idle_threads_sleep  sets a private field of the context; else idle threads spin, as is TensorFlow's default
remember_thread         keeps a Python thread state; else Python makes one for each call
skip_autograph          extends a private list of rules; else AutoGraph converts our functions, too
is_steady               reads how a dataset was made; else any dataset counts as steady
without_own_frames      filters the stack that a node notes; else errors of graphs show our frames, too
add_custom_call         calls XLA functions by mangled names; else jit_compile=True allows no collectives
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import logging
import os
import re
import threading
import traceback
from _thread import get_ident
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.autograph.core import config as autograph_config
from tensorflow.python.eager import context as eager_context

from horovod.logs import logger
from horovod.tensorflow.library import lib

__all__ = [
    "HANDLER",
    "Callback",
    "Layout",
    "add_custom_call",
    "calm",
    "fail_custom_call",
    "is_steady",
    "known_layout",
    "let_idle_threads_sleep",
    "remember_thread",
    "skip_autograph",
    "without_own_frames",
]

_P = ctypes.c_void_p
#: A std::function: two words for the closure, one for its manager function, one for its invoker function.
_Words = _P * 4


class Callback:
    """TensorFlow's done callback of an asynchronous kernel, kept alive after the kernel returns.

    The callback is a ``std::function`` on TensorFlow's stack, which is destroyed when the kernel returns. If its layout
    is that of libstdc++, we move it like its move constructor. Otherwise the kernel must not return before the call.
    """

    __slots__ = ("_address", "_called", "_own")

    def __init__(self, done: int) -> None:
        self._address = done
        self._called = None if known_layout(done) else threading.Event()
        if self._called is None:
            theirs = _Words.from_address(done)
            self._own = _Words(*theirs)
            theirs[2] = None
            self._address = ctypes.addressof(self._own)

    def __call__(self) -> None:
        """Tell TensorFlow that the operation is done."""
        lib.TF_RunAsyncOpKernelDoneCallback(self._address)
        if self._called is not None:
            self._called.set()

    def stay(self) -> None:
        """Block until the kernel may return: not at all, or until the callback was called."""
        if self._called is None:
            return
        is_interrupted = False
        while not self._called.is_set():
            try:
                self._called.wait()
            except BaseException:  # after any exception of a signal handler, the operation still holds the callback
                is_interrupted = True
        if is_interrupted:
            _thread.interrupt_main()


class Layout:
    """Detects from the first callback whether callbacks have the layout of libstdc++.

    Args:
        code_of: part of the path of the libraries that contain a callback's functions.
    """

    def __init__(self, code_of: str = "tensorflow") -> None:
        self._code_of = code_of
        self._lock = threading.Lock()
        self.is_known: bool | None = None  # whether the layout is that of libstdc++; None before the first callback

    def __call__(self, done: int) -> bool:
        if self.is_known is not None:
            return self.is_known
        with self._lock:
            if self.is_known is None:
                manager, invoker = _Words.from_address(done)[2:]
                self.is_known = self._has_code(manager or 0) and self._has_code(invoker or 0)
                if not self.is_known:
                    logger.warning(
                        "horovod.tensorflow does not know the layout of callbacks in TensorFlow %s. In graphs each "
                        "collective keeps one of TF_NUM_INTEROP_THREADS threads until it is done, and functions run "
                        "collectives in the order of the program, which must be the same on all ranks. For a Session, "
                        "set TF_NUM_INTEROP_THREADS to the number of collectives or more.",
                        tf.__version__,
                    )
            return self.is_known

    def _has_code(self, address: int) -> bool:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        parts = re.findall(rf"^([0-9a-f]+)-([0-9a-f]+) r-xp .*{self._code_of}.*$", maps, re.MULTILINE)
        return any(int(start, 16) <= address < int(end, 16) for start, end in parts)


known_layout = Layout()


# -- threads ---------------------------------------------------------------------------------------------------------

_remembered: set[int] = set()
_MOST_REMEMBERED = 256


def remember_thread() -> None:
    """Make Python keep its state of this TensorFlow thread; otherwise each kernel would create it again, in 35 us."""
    if get_ident() not in _remembered and len(_remembered) < _MOST_REMEMBERED:
        _remembered.add(get_ident())
        ctypes.pythonapi.PyGILState_Ensure()  # never released, because a release would free the state


def calm(context: Any, environ: Mapping[str, str]) -> bool:
    """Let idle threads sleep immediately if operations have one thread; return whether the setting was made.

    By default they spin before they sleep. On a rank with only one core, this makes a training step of a small model
    take a third longer. A context that already has threads or user options stays unchanged.
    """
    if environ.get("TF_NUM_INTRAOP_THREADS") != "1":
        return False
    if getattr(context, "_context_handle", 0) is not None or getattr(context, "_config", 0) is not None:
        return False
    experimental = config_pb2.ConfigProto.Experimental(disable_thread_spinning=True)
    context._config = config_pb2.ConfigProto(experimental=experimental)
    return True


def let_idle_threads_sleep() -> None:
    """Apply ``calm``; without a context, apply it when TensorFlow makes one, because scripts may bring their own."""
    if (present := eager_context.context_safe()) is not None:
        calm(present, os.environ)
        return
    create = getattr(eager_context, "_create_context", None)
    if create is None:
        return

    def create_calm() -> None:
        create()
        calm(eager_context.context_safe(), os.environ)

    setattr(eager_context, "_create_context", create_calm)  # noqa: B010  a private name, unknown to mypy


def skip_autograph() -> None:
    """Make AutoGraph call our functions unconverted: converted ones make errors hard to read."""
    if (rules := getattr(autograph_config, "CONVERSION_RULES", None)) is not None:
        autograph_config.CONVERSION_RULES = (autograph_config.DoNotConvert("horovod"), *rules)


# -- custom calls of XLA ---------------------------------------------------------------------------------------------

#: ``handler(out, ins, opaque, length, status)``
HANDLER = ctypes.CFUNCTYPE(None, _P, ctypes.POINTER(_P), _P, ctypes.c_size_t, _P)
_GLOBAL = "_ZN3xla24CustomCallTargetRegistry6GlobalEv"
_REGISTER = "_ZN3xla24CustomCallTargetRegistry8RegisterERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEEPvS8_"


class _String(ctypes.Structure):
    """A ``std::string``; up to 15 characters are stored inside it."""

    _fields_ = (("data", _P), ("size", ctypes.c_size_t), ("capacity", ctypes.c_size_t), ("pad", ctypes.c_size_t))


def _string(text: bytes) -> _String:
    buffer = ctypes.create_string_buffer(text)
    made = _String(ctypes.addressof(buffer), len(text), len(text), 0)
    made.text = buffer  # lives as long as the string
    return made


def add_custom_call(name: str, handler: Any) -> None:
    """Register a custom call for the CPU with XLA. Its handler, a ``HANDLER``, must never be freed.

    Raises:
        NotImplementedError: this TensorFlow lacks the XLA functions.
    """
    path = next(iter(sorted(Path(tf.sysconfig.get_lib()).glob("libtensorflow_cc*"))), None)
    try:
        library = ctypes.CDLL(str(path))
        registry, register = getattr(library, _GLOBAL), getattr(library, _REGISTER)
    except (OSError, AttributeError):
        raise NotImplementedError(
            f"TensorFlow {tf.__version__} has no function that adds custom calls to XLA, so a function with "
            "jit_compile=True cannot hold a collective. Leave jit_compile out; in Keras, compile(jit_compile=False)"
        ) from None
    registry.restype = _P
    register.argtypes = [_P, ctypes.POINTER(_String), _P, ctypes.POINTER(_String)]
    register(registry(), _string(name.encode()), ctypes.cast(handler, _P), _string(b"Host"))


def fail_custom_call(status: int, text: bytes) -> None:
    """Write an error text to the ``std::optional<std::string>`` of a custom call; XLA frees its memory."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = _P, [ctypes.c_size_t]
    memory = libc.malloc(len(text) + 1)
    ctypes.memmove(memory, text + b"\0", len(text) + 1)
    ctypes.memmove(status, ctypes.byref(_String(memory, len(text), len(text), 0)), 32)
    ctypes.memset(status + 32, 1, 1)


def is_steady(dataset: Any) -> bool:
    """Return whether a dataset has the same order in each iteration and on each rank, as far as it can be seen."""
    seeds = [getattr(dataset, name) for name in ("_seed", "_seed2") if hasattr(dataset, name)]
    if (seeds and not any(seeds)) or getattr(dataset, "_reshuffle_each_iteration", False) is not False:
        return False
    if getattr(dataset, "_rerandomize", False):
        return False
    if dataset.options().deterministic is False or getattr(dataset, "_deterministic", "") == "false":
        return False
    function: Any = getattr(dataset, "_map_func", None)
    if isinstance(getattr(function, "output_structure", None), tf.data.DatasetSpec):
        graph = function.function.graph.as_graph_def()
        if hasattr(dataset, "_prefetch_input_elements"):  # a parallel interleave(): only its graph has `deterministic`
            ignore = tf.data.experimental.ExternalStatePolicy.IGNORE
            graph = type(graph).FromString(dataset._as_serialized_graph(external_state_policy=ignore).numpy())
        if not _is_steady_graph(graph):
            return False
    return all(map(is_steady, getattr(dataset, "_inputs", tuple)()))


def _is_steady_graph(graph: Any) -> bool:
    """Whether a graph has steady datasets only; those of the function of ``flat_map`` are only in its graph."""
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        named = {node.name: node for node in nodes}
        for node in nodes:
            seeds = [named.get(name.split(":")[0]) for name in node.input[2:4]]
            has_no_seed = node.op.startswith("ShuffleDataset") and all(map(_is_zero, seeds))
            if has_no_seed or node.attr["deterministic"].s == b"false":
                return False
    return True


def _is_zero(node: Any) -> bool:
    return node is not None and node.op == "Const" and not tf.make_ndarray(node.attr["value"].tensor)


def without_own_frames() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which new nodes do not note our frames, so that an error of a graph shows the user's lines;
    with HOROVOD_LOG_LEVEL=debug they do.
    """
    return contextlib.nullcontext() if _Frames is None or logger.isEnabledFor(logging.DEBUG) else _Frames()


try:
    from tensorflow.python.util.tf_stack import StackTraceFilter
except ImportError:
    _Frames: Any = None
else:

    class _Frames(StackTraceFilter):  # type: ignore[no-redef]
        def get_filtered_filenames(self) -> frozenset[str]:
            # Only those in use: TensorFlow copies the names for each node.
            frames = [frame for frame, _ in traceback.walk_stack(None)]
            own = [frame for frame in frames if frame.f_globals.get("__name__", "").partition(".")[0] == "horovod"]
            return frozenset(frame.f_code.co_filename for frame in own).union(self.parent.get_filtered_filenames())
