"""TensorFlow's callback of an asynchronous operation, kept beyond the call that brought it.

It is a ``std::function`` on the stack of TensorFlow, which dies there when the kernel returns. Where it lies in memory
as libstdc++ has it, it is moved, as its move constructor would. Anywhere else it is left where it is, and a kernel
returns only when its operation is done: slower, as it keeps its thread, but correct.
"""

from __future__ import annotations

import _thread
import ctypes
import re
import threading
from pathlib import Path

import tensorflow as tf

from horovod.logs import logger
from horovod.tensorflow.library import lib

__all__ = ["Callback", "Layout", "known_layout"]

#: Two words for what is called, one for the function that manages it, one for the function that calls it.
_Words = ctypes.c_void_p * 4


class Callback:
    """The callback of one execution.

    Args:
        done: where TensorFlow has it.
    """

    __slots__ = ("_address", "_ended", "_own")

    def __init__(self, done: int) -> None:
        self._address = done
        self._ended = None if known_layout.is_known or known_layout(done) else threading.Event()
        if self._ended is None:
            theirs = _Words.from_address(done)
            self._own = _Words(*theirs)
            theirs[2] = None
            self._address = ctypes.addressof(self._own)

    def __call__(self) -> None:
        """Tell TensorFlow that the operation is done."""
        lib.TF_RunAsyncOpKernelDoneCallback(self._address)
        if self._ended is not None:
            self._ended.set()

    def stay(self) -> None:
        """Return when the callback may lose its place: at once, or when it has been called."""
        if self._ended is None:
            return
        is_interrupted = False
        while not self._ended.is_set():
            try:
                self._ended.wait()
            except BaseException:  # the operation has the callback, whatever a signal handler of the script's raises
                is_interrupted = True
        if is_interrupted:
            _thread.interrupt_main()


class Layout:
    """Whether callbacks lie in memory as libstdc++ has them, by the first one: one TensorFlow has one layout.

    Attributes:
        is_known: None before the first callback.

    Args:
        code_of: a part of the paths of the libraries whose functions a callback refers to.
    """

    def __init__(self, code_of: str = "tensorflow") -> None:
        self._code_of = code_of
        self._lock = threading.Lock()
        self.is_known: bool | None = None

    def __call__(self, done: int) -> bool:
        with self._lock:
            if self.is_known is None:
                manager, invoker = _Words.from_address(done)[2:]
                self.is_known = self._has_code(manager or 0) and self._has_code(invoker or 0)
                if not self.is_known:
                    logger.warning(
                        "horovod.tensorflow does not know how TensorFlow %s keeps its callbacks: in graphs, each "
                        "collective keeps one of TF_NUM_INTEROP_THREADS threads until it is done, and functions run "
                        "theirs in the order of the program, which must be the same on all ranks. In a Session, let "
                        "there be as many threads as collectives.",
                        tf.__version__,
                    )
            return self.is_known

    def _has_code(self, address: int) -> bool:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        parts = re.findall(rf"^([0-9a-f]+)-([0-9a-f]+) r-xp .*{self._code_of}.*$", maps, re.MULTILINE)
        return any(int(start, 16) <= address < int(end, 16) for start, end in parts)


known_layout = Layout()
