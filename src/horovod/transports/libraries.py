"""Provides the kernels of an array library that is loaded already, and limits their threads.

An array library spreads large work over as many threads as the host has cores, unless it is configured otherwise.
If all ranks do so at once, they wait for each other's threads, a time slice each time. Engines in C++ do this work on
one thread; it must not be slower here because of more threads.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator

from horovod.core.requests import TensorSpec
from horovod.transports.kernels import Kernels

__all__ = ["are_spread", "kernels_named", "on_one_thread"]

_KERNELS: dict[str, Kernels] = {}


def kernels_named(name: str) -> Kernels:
    """Return the kernels called ``numpy`` or ``torch``; never load torch for them.

    Raises:
        LookupError: no kernels have this name, or their library is not loaded.
    """
    kernels = _KERNELS.get(name)
    if kernels is None:
        if name == "torch":
            if "torch" not in sys.modules:
                raise LookupError("torch kernels were asked for, but torch is not loaded")
            from horovod.transports.kernels_torch import TorchKernels

            kernels = TorchKernels()
        elif name == "numpy":
            from horovod.transports.kernels_numpy import NumpyKernels

            kernels = NumpyKernels()
        else:
            raise LookupError(f"kernels must be 'numpy' or 'torch'; received {name!r}; correct the adapter's kernels")
        _KERNELS[name] = kernels
    return kernels


#: No library spreads this many elements, or fewer, over several threads.
_ONE_THREAD_COUNT = 32 << 10


def are_spread(tensors: Iterable[TensorSpec]) -> bool:
    """Whether a library may spread work on one of ``tensors`` over several threads."""
    return any(tensor.count > _ONE_THREAD_COUNT for tensor in tensors)


@contextlib.contextmanager
def on_one_thread(kernels: Kernels) -> Iterator[None]:
    """Keep the work of the kernels in the calling thread while the block runs.

    It uses one thread, not one per free core: a change of the size of a team of threads ends some threads, and starts
    them again later.
    """
    threads = kernels.threads()
    kernels.set_threads(1)
    try:
        yield
    finally:
        kernels.set_threads(threads)
