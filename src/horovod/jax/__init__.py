"""horovod for JAX: ``import horovod.jax as hvd``.

    ops                 the collectives, on arrays and pytrees; eagerly and under jit, grad, vmap, scan
    functions           broadcast parameters, states and Python objects
    optimizer           DistributedOptimizer for optax, allreduce_gradients
    elastic             state and decorators for elastic jobs; held keeps array values beyond a step
    trees               split pytrees into arrays to send and other leaves
    failures            horovod's own errors from compiled programs
    placing             run a call now, or make it part of a program
    primitives          the JAX primitive: shapes, derivatives, batching
    lowering            compilation of the primitive into programs
    unsafe              the parts of lowering that depend on JAX internals
    calls               one collective, run eagerly or in a program
    runtime             JAX for horovod.bindings

This module re-exports the names that training scripts use.
"""

from horovod.bindings import common_names
from horovod.bindings.common_names import *  # noqa: F403 - all of it, by its own list
from horovod.bindings.misuse import not_installed

try:
    import jax as _jax  # noqa: F401
except ModuleNotFoundError as error:
    raise not_installed(error, "jax", "jax") from None

from horovod.bindings.compression import Compression
from horovod.jax import elastic, functions, ops
from horovod.jax import lowering as _lowering
from horovod.jax.failures import typed_errors
from horovod.jax.functions import *  # noqa: F403 - all of it, by its own list
from horovod.jax.ops import *  # noqa: F403 - all of it, by its own list
from horovod.jax.optimizer import DistributedOptimizer, allreduce_gradients

_lowering.register()


__all__ = [
    "Compression",
    "DistributedOptimizer",
    "allreduce_gradients",
    "elastic",
    "typed_errors",
]
__all__ += functions.__all__
__all__ += ops.__all__
__all__ += common_names.__all__
