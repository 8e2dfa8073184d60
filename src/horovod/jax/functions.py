"""Synchronize parameters, states and Python objects across ranks."""

from __future__ import annotations

from typing import Any

import jax

from horovod.bindings import objects
from horovod.bindings.agreement import agree_on_names
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.core.requests import Kind
from horovod.jax.calls import place
from horovod.jax.placing import carry_out, make_call, outside_programs
from horovod.jax.runtime import is_compiling, is_tracing
from horovod.jax.trees import Leaves

__all__ = ["allgather_object", "broadcast_object", "broadcast_parameters"]

_SAME_TREE = (
    "Make the same pytree on every rank; a rank that restores a checkpoint (flax.serialization.from_bytes) restores it "
    "into that."
)
_OUTSIDE = "call it before the program, and pass the result in"


def broadcast_parameters(params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Any:
    """Return the root's parameters, on every rank.

    Collective over ``process_set``. Takes any pytree: parameters, an optimizer's state, random keys, a train state or
    Equinox module. JAX's arrays cannot be written, so use the returned pytree.

    Args:
        params: a pytree of the same structure on every rank. Python and numpy numbers are broadcast, too, and keep
            their type. Strings, functions and other leaves that are neither arrays nor numbers stay local.
        root_rank: global rank that sends its values.
        process_set: ranks that take part.

    Returns:
        The pytree with the root's arrays and numbers; the input arrays are neither donated nor changed.

    Raises:
        MismatchError: leaves, shapes or dtypes differ between ranks; raised on every rank.
        PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.
        NotInitializedError: ``init()`` was not called.

    Blocks until all values have arrived.
    """
    leaves = Leaves(params, split_scalars=not is_tracing())
    call = make_call(Kind.BROADCAST, "broadcast_parameters", process_set, root=root_rank)
    scalars: dict[int, Any] = {}
    if not is_compiling():
        names = [*leaves.names(), *(f"{name}, a scalar" for name in leaves.scalar_names())]
        agree_on_names("broadcast_parameters", names, process_set, _SAME_TREE)
    if leaves.scalars:
        # Send scalars as objects: this keeps type and precision, and the root may have an array instead of a number.
        own = leaves.scalars
        values = objects.broadcast_object([*own.values()], root_rank, "broadcast_parameters.scalars", process_set)
        pairs = zip(own.items(), values, strict=True)
        scalars = {i: place(new, old) if isinstance(old, jax.Array) else new for (i, old), new in pairs}
    return leaves.rebuild(carry_out(call, leaves.arrays), scalars)


broadcast_object = outside_programs(objects.broadcast_object, _OUTSIDE)
allgather_object = outside_programs(objects.allgather_object, _OUTSIDE)
