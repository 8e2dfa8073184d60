"""How many threads of its own the arithmetic of a collective may use.

An array library spreads what is large over as many threads as the host has cores, unless somebody has told it
better. Ranks that all do so at once wait for each other's threads, a time slice each time. Work that
engines in C++ do on one thread must not be slower here for that reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from horovod.core.requests import TensorSpec
from horovod.transports.kernels import Kernels

__all__ = ["are_spread", "on_one_thread"]

#: No library spreads so few elements over several threads.
_ONE_THREAD_COUNT = 32 << 10


def are_spread(tensors: Iterable[TensorSpec]) -> bool:
    """Whether a library may spread work on one of ``tensors`` over several threads."""
    return any(tensor.count > _ONE_THREAD_COUNT for tensor in tensors)


@contextlib.contextmanager
def on_one_thread(kernels: Kernels) -> Iterator[None]:
    """Keep what the kernels do meanwhile in the calling thread.

    Not on as many as there are cores for: to change the size of a team of threads ends some, and starts them again
    later.
    """
    threads = kernels.threads()
    kernels.set_threads(1)
    try:
        yield
    finally:
        kernels.set_threads(threads)
