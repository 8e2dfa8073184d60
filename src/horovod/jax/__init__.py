"""horovod for JAX: ``import horovod.jax as hvd``.

    ops                 the collectives, on arrays and pytrees; eagerly and under jit, grad, vmap, scan
    handles             those that are begun and waited for later; eagerly only
    functions           parameters, states and Python objects of all ranks made the same
    optimizer           DistributedOptimizer for optax, allreduce_gradients
    trees               pytrees taken apart: what travels, what stays
    compression         what goes over the wire
    failures            horovod's own errors out of compiled programs
    placing             whether a call is carried out now, or becomes part of a program
    primitives          the JAX primitive: shapes, derivatives, batching
    lowering            how it gets into a compiled program
    calls               how it is carried out, eagerly and there
    adapter, runtime    what the framework-free bindings need to know about JAX

This module gathers the names of a training script.
"""

from __future__ import annotations

from typing import NoReturn

from horovod.bindings.later import explain
from horovod.bindings.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovod.bindings.reductions import Adasum, Average, Max, Min, Product, Sum
from horovod.errors import HorovodInternalError
from horovod.jax import lowering as _lowering
from horovod.jax.compression import Compression
from horovod.jax.failures import typed_errors
from horovod.jax.functions import allgather_object, broadcast_object, broadcast_parameters
from horovod.jax.handles import (
    allgather_async,
    allreduce_async,
    alltoall_async,
    broadcast_async,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_reducescatter_async,
    poll,
    reducescatter_async,
    synchronize,
)
from horovod.jax.ops import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
)
from horovod.jax.optimizer import DistributedOptimizer, allreduce_gradients
from horovod.jax.runtime import comm as _comm
from horovod.jax.runtime import init

_lowering.register()

shutdown = _comm.shutdown
is_initialized = _comm.is_initialized
size = _comm.size
rank = _comm.rank
local_size = _comm.local_size
local_rank = _comm.local_rank
cross_size = _comm.cross_size
cross_rank = _comm.cross_rank
is_homogeneous = _comm.is_homogeneous
start_timeline = _comm.start_timeline
stop_timeline = _comm.stop_timeline
stats = _comm.stats

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "allreduce_gradients",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "shutdown",
    "size",
    "start_timeline",
    "stats",
    "stop_timeline",
    "synchronize",
    "typed_errors",
]


def __getattr__(name: str) -> NoReturn:
    plain = name.removesuffix("_")
    if plain != name and plain in __all__:
        raise AttributeError(f"JAX's arrays cannot be written, so there is no hvd.{name}; use hvd.{plain}")
    raise AttributeError(explain(f"jax.{name}") or f"module {__name__!r} has no attribute {name!r}")
