"""The only ``Collectives`` of JAX in this process, with its adapter, and queries of JAX's tracing state."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from horovod import context
from horovod.bindings.collectives import Collectives
from horovod.bindings.numpy_adapter import ImmutableAdapter
from horovod.bindings.process_sets import at_init, when_asked

try:
    from jax.extend.core import get_opaque_trace_state, unsafe_am_i_under_a_jit_DO_NOT_USE
except ImportError:  # before JAX 0.8
    from jax.core import get_opaque_trace_state, unsafe_am_i_under_a_jit_DO_NOT_USE

__all__ = ["comm", "is_compiling", "is_tracing"]

Array = np.ndarray[Any, np.dtype[Any]]

#: Up to this size, a copy takes JAX half as long as wrapping the memory without a copy.
_COPIED_BYTES = 65536


class _JaxAdapter(ImmutableAdapter):
    """See ``Adapter``. Results are arrays of JAX's default device, over the memory that the ranks filled."""

    name = "jax"

    def buffer(self, tensor: Any) -> Array | None:
        """Wait for the array, and return its memory, read-only; for devices other than the CPU, a copy. None
        if it is not contiguous.
        """
        if not isinstance(tensor, jax.Array):
            raise TypeError(f"expected a JAX array, received {type(tensor).__name__}; use jax.numpy.asarray()")
        array = np.asarray(tensor)
        return array if array.flags.c_contiguous else None

    def wrap(self, buffer: Array) -> jax.Array:
        """Return an array over the buffer, or over a copy of a small buffer."""
        return jax.device_put(buffer, may_alias=buffer.nbytes > _COPIED_BYTES)


comm = Collectives(_JaxAdapter())

with jax.core.eval_context():
    _NOT_TRACING = get_opaque_trace_state()

#: Rank and number of ranks, if a compiled JAX program has queried one of them.
_asked: list[tuple[int, int]] = []


def _forget_other_worlds() -> None:
    """Clear JAX's caches if a program contains a rank or size that is no longer valid."""
    if _asked and _asked[-1] != (context.world().rank, context.world().size):
        _asked.clear()
        jax.clear_caches()


def _note() -> None:
    if is_compiling():
        _asked[:] = [(context.world().rank, context.world().size)]


at_init(_forget_other_worlds)
when_asked(_note)


def is_tracing() -> bool:
    """Return whether JAX is tracing now: under jit, grad, vmap, scan and so on."""
    traced: bool = get_opaque_trace_state() != _NOT_TRACING
    return traced


def is_compiling() -> bool:
    """Return whether calls now become part of a program instead of being executed."""
    return is_tracing() and bool(unsafe_am_i_under_a_jit_DO_NOT_USE())
