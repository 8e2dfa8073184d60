"""DistributedOptimizer: an optax transformation that first combines the gradients of all ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from horovod.bindings.compression import Compression, Compressor, check_compression, compress, decompress
from horovod.bindings.docstrings import explained_like
from horovod.bindings.gradients.parameters import check_passes, predivided
from horovod.bindings.misuse import type_name, wrong_argument
from horovod.bindings.process_sets import ProcessSet, global_process_set, id_or_none
from horovod.bindings.reductions import Average, resolve_op
from horovod.core.requests import Kind, ReduceOp
from horovod.jax.ops import allreduce
from horovod.jax.placing import carry_out, make_call
from horovod.jax.runtime import is_tracing
from horovod.jax.trees import Leaves

__all__ = ["AccumulationState", "DistributedOptimizer", "allreduce_gradients"]


@explained_like(
    allreduce,
    grads="a pytree of the same structure on every rank; numbers become arrays; other leaves that are not arrays are "
    "returned unchanged.",
    name="key of the match.",
    params="the parameters; if given, the first step warns if they differ between ranks.",
)
def allreduce_gradients(
    grads: Any,
    op: int = Average,
    compression: type[Compressor] = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str = "gradients",
    params: Any = None,
) -> Any:
    """Combine a pytree of gradients over all ranks, as one operation.

    Collective over ``process_set``; works eagerly and inside ``jit``.

    Returns:
        A pytree of the same structure.
    """
    how = resolve_op(op, None)
    leaves = Leaves(grads)
    wires, contexts = compress(compression, leaves.arrays)
    watched = Leaves(params)
    call = make_call(
        Kind.ALLREDUCE, name, process_set, op=how, prescale=prescale_factor, postscale=postscale_factor,
        parts=leaves.parts, watched=tuple(name or "params" for name in watched.names()) if wires else (),
    )  # fmt: skip
    reduced = carry_out(call, [*wires, *watched.arrays] if wires else [])
    return leaves.rebuild(decompress(compression, reduced, contexts))


class AccumulationState(NamedTuple):
    """State of a ``DistributedOptimizer`` with ``backward_passes_per_step`` above 1.

    Attributes:
        count: passes since the last step.
        gradients: sum of the gradients of these passes, on this rank.
        inner: state of the optimizer.
    """

    count: Any
    gradients: Any
    inner: Any


def DistributedOptimizer(  # noqa: N802  Horovod's name
    optimizer: Any,
    op: int = Average,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str = "DistributedOptimizer",
) -> Any:
    """Return an optax transformation that combines the gradients of all ranks, and then applies ``optimizer``.

    All gradients are one operation. With ``backward_passes_per_step=k`` each rank accumulates them, and every k-th
    ``update`` combines them; other updates return zeros. If ``params`` are passed to ``update``, as optax allows, the
    first step warns if they differ between ranks because ``broadcast_parameters`` was not called.

    Args:
        optimizer: an ``optax.GradientTransformation``.
        op: Average (the default) or Sum of the gradients; or Adasum, which combines the updates that each rank has
            computed from its own gradients.
        compression: compressor of the gradients, such as ``Compression.bf16``.
        backward_passes_per_step: number of ``update`` calls per step.
        average_aggregated_gradients: whether to divide the sums by ``backward_passes_per_step``, as
            ``optax.MultiSteps`` does; off by default, as in Horovod.
        gradient_predivide_factor: divisor before the sum of an average; the sum is divided by size / factor afterwards.
        process_set: ranks that take part; on other ranks the result acts like ``optimizer``.
        name: key of the match; use different names if ranks may run updates of optimizers in different orders.

    Returns:
        An ``optax.GradientTransformationExtraArgs``. Its state is that of ``optimizer`` if
        ``backward_passes_per_step`` is 1.

    Raises:
        RequestError: an argument is invalid.
    """
    import optax

    how = resolve_op(op, None)
    id_or_none(process_set)
    check_compression(compression)
    check_passes(backward_passes_per_step)
    prescale, postscale = predivided(how, gradient_predivide_factor)
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise wrong_argument(
            f"optimizer must be a transformation of optax, such as optax.sgd(0.1). Received: {type_name(optimizer)}"
        )
    if getattr(optimizer.update, "__module__", "") == __name__:
        raise wrong_argument("optimizer is a DistributedOptimizer already; wrap the plain one, once")
    inner = optax.with_extra_args_support(optimizer)

    def combine(tree: Any, what: str, params: Any) -> Any:
        if process_set.included() is False:
            return tree
        return allreduce_gradients(tree, how, compression, prescale, postscale, process_set, f"{name}.{what}", params)

    def step(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if how is ReduceOp.ADASUM:
            updates, state = inner.update(updates, state, params, **extra)
            return combine(updates, "updates", params), state
        updates, state = inner.update(combine(updates, "gradients", params), state, params, **extra)
        return updates, state

    if backward_passes_per_step == 1:
        return optax.GradientTransformationExtraArgs(inner.init, step)
    accumulate = _Accumulation(inner.init, step, backward_passes_per_step, average_aggregated_gradients)
    return optax.GradientTransformationExtraArgs(accumulate.init, accumulate.update)


class _Accumulation:
    """Accumulates gradients, and steps at every k-th update. ``step`` combines gradients and applies the optimizer."""

    def __init__(self, init: Any, step: Any, passes: int, average: bool) -> None:
        self._init = init
        self._step = step
        self._passes = passes
        self._average = average

    def init(self, params: Any) -> AccumulationState:
        """Return a state without accumulated gradients."""
        return AccumulationState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), self._init(params))

    def update(
        self, updates: Any, state: AccumulationState, params: Any = None, **extra: Any
    ) -> tuple[Any, AccumulationState]:
        """Accumulate gradients; step at every k-th call."""
        total = jax.tree.map(jnp.add, state.gradients, updates)

        def last(total: Any, inner: Any) -> tuple[Any, AccumulationState]:
            mean = jax.tree.map(lambda x: x / self._passes, total) if self._average else total
            changes, inner = self._step(mean, inner, params, **extra)
            return changes, AccumulationState(jnp.zeros_like(state.count), jax.tree.map(jnp.zeros_like, total), inner)

        def early(total: Any, inner: Any) -> tuple[Any, AccumulationState]:
            return jax.tree.map(jnp.zeros_like, total), AccumulationState(state.count + 1, total, inner)

        # The count is the same on all ranks, so either all ranks combine gradients or none.
        if not is_tracing():
            return last(total, state.inner) if int(state.count) + 1 == self._passes else early(total, state.inner)
        changes, after = jax.lax.cond(state.count + 1 == self._passes, last, early, total, state.inner)
        return changes, after
