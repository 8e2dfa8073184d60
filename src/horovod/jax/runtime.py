"""The only ``Collectives`` of JAX in this process, and queries of JAX's tracing state."""

from __future__ import annotations

import jax

from horovod import context
from horovod.bindings.collectives import Collectives
from horovod.bindings.process_sets import at_init, when_asked
from horovod.jax.adapter import JaxAdapter

try:
    from jax.extend.core import get_opaque_trace_state, unsafe_am_i_under_a_jit_DO_NOT_USE
except ImportError:  # before JAX 0.8
    from jax.core import get_opaque_trace_state, unsafe_am_i_under_a_jit_DO_NOT_USE

__all__ = ["comm", "is_compiling", "is_tracing"]

comm = Collectives(JaxAdapter())

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
