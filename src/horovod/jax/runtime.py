"""The one ``Collectives`` of JAX in this process, and where in JAX's tracing a call is made."""

from __future__ import annotations

import jax

from horovod import context
from horovod.bindings.collectives import Collectives
from horovod.bindings.process_sets import at_init
from horovod.jax.adapter import JaxAdapter

try:
    from jax.extend.core import get_opaque_trace_state, unsafe_am_i_under_a_jit_DO_NOT_USE
except ImportError:  # before JAX 0.8
    from jax.core import get_opaque_trace_state, unsafe_am_i_under_a_jit_DO_NOT_USE

__all__ = ["comm", "is_compiling", "is_tracing"]

comm = Collectives(JaxAdapter())

with jax.core.eval_context():
    _NOT_TRACING = get_opaque_trace_state()

_worlds: list[tuple[int, int]] = []


def _forget_other_worlds() -> None:
    """Let JAX forget programs that it has compiled for another rank, or another number of ranks."""
    here = (context.world().rank, context.world().size)
    if _worlds and _worlds[-1] != here:
        jax.clear_caches()
    _worlds[:] = [here]


at_init(_forget_other_worlds)


def is_tracing() -> bool:
    """Return whether JAX transforms what is called now: under jit, grad, vmap, scan and so on."""
    traced: bool = get_opaque_trace_state() != _NOT_TRACING
    return traced


def is_compiling() -> bool:
    """Return whether what is called now becomes part of a program, instead of being executed."""
    return is_tracing() and bool(unsafe_am_i_under_a_jit_DO_NOT_USE())
