"""The one ``Collectives`` of JAX in this process, and where in JAX's tracing a call is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from horovod import context
from horovod.bindings.collectives import Collectives
from horovod.bindings.process_sets import ProcessSet
from horovod.bindings.worldly import Worldly
from horovod.jax.adapter import JaxAdapter

try:
    from jax.extend.core import get_opaque_trace_state, unsafe_am_i_under_a_jit_DO_NOT_USE
except ImportError:  # before JAX 0.8
    from jax.core import get_opaque_trace_state, unsafe_am_i_under_a_jit_DO_NOT_USE

__all__ = ["comm", "init", "is_compiling", "is_tracing"]

comm = Collectives(JaxAdapter())

with jax.core.eval_context():
    _NOT_TRACING = get_opaque_trace_state()

_worlds: list[tuple[int, int]] = []


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the job that a launcher started, or make a world of one; does nothing when already done.

    Programs that JAX has compiled for another number of ranks are forgotten.

    Args:
        comm: None for all ranks; a list of some, which then form a job of their own and are numbered as they are
            listed; or a communicator of mpi4py, whose processes form the job.
        process_sets: sets to register at once, the same list on every rank; "dynamic" is accepted and
            changes nothing, since sets can always be added later.

    Raises:
        InitError: the environment is contradictory, or the ranks did not find each other.
        ValueError: a process set is given twice, or cannot exist; this process is not in ``comm``, or runs with
            another one.
        NotImplementedError: process sets made of communicators, in a job made of a list.

    Blocks until all ranks called, or HOROVOD_START_TIMEOUT seconds.
    """
    Worldly.init(comm, process_sets)
    here = (context.world().rank, context.world().size)
    if _worlds and _worlds[-1] != here:
        jax.clear_caches()
    _worlds[:] = [here]


def is_tracing() -> bool:
    """Return whether JAX transforms what is called now: under jit, grad, vmap, scan and so on."""
    traced: bool = get_opaque_trace_state() != _NOT_TRACING
    return traced


def is_compiling() -> bool:
    """Return whether what is called now becomes part of a program, instead of being executed."""
    return is_tracing() and bool(unsafe_am_i_under_a_jit_DO_NOT_USE())
