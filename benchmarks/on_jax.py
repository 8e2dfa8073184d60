"""``horovod.jax`` beside JAX's own collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import horovod.jax as hvd
import horovod.numpy
from benchmarks.callers import Array, Caller
from benchmarks.jax_gloo import AXIS, own_part, ranks_mesh, spread, start_jax, sum_over_ranks
from benchmarks.models_jax import JaxTask, make_task
from horovod.bench.control import Agreement, Contender
from horovod.bench.stepping import Arm

__all__ = ["arms", "contenders", "make_task"]

_RATE = 0.01


def _eager(array: Array) -> Callable[[], Any]:
    x = jax.numpy.asarray(array)
    return lambda: hvd.allreduce(x, op=hvd.Sum, name="bench.eager").block_until_ready()


def _program(array: Array) -> Callable[[], Any]:
    x = jax.numpy.asarray(array)
    program = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum, name="bench.program"))
    return lambda: program(x).block_until_ready()


def _empty_callback(array: Array) -> Callable[[], Any]:
    x = jax.numpy.asarray(array)
    program = jax.jit(lambda x: jax.pure_callback(lambda x: x, x, x))
    return lambda: program(x).block_until_ready()


def contenders(control: Agreement, args: Any = None) -> list[Contender]:
    """Allreduce of numpy's arrays, eager, and in a program; a callback that does nothing; and JAX's own, over Gloo."""
    start_jax(control)
    plain = horovod.numpy
    return [
        Caller("horovod numpy", control, lambda array: lambda: plain.allreduce(array, op=hvd.Sum, name="bench.numpy")),
        Caller("horovod eager", control, _eager),
        Caller("horovod jit", control, _program),
        Caller("empty callback", control, _empty_callback, is_sum=False),
        Caller("jax gloo", control, sum_over_ranks),
    ]


def _sgd() -> Any:
    return optax.sgd(_RATE, momentum=0.9)


def _make(name: str, step: Callable[..., Any], params: Any, state: Any, data: tuple[Any, Any]) -> Arm:
    """Return an arm that runs a program over and over; what it updates is given back to it in place."""
    program = jax.jit(step, donate_argnums=(0, 1))
    held = [jax.tree.map(lambda leaf: leaf.copy(), params), state]

    def run() -> None:
        held[0], held[1] = program(*held, *data)
        jax.block_until_ready(held)

    def weights() -> Array:
        return np.concatenate([np.asarray(own_part(leaf)).reshape(-1) for leaf in jax.tree.leaves(held[0])])

    return Arm(name, run, weights)


def _alone(name: str, task: JaxTask, optimizer: Any) -> Arm:
    def step(params: Any, state: Any, inputs: Any, targets: Any) -> Any:
        updates, state = optimizer.update(jax.grad(task.loss)(params, inputs, targets), state, params)
        return optax.apply_updates(params, updates), state

    return _make(name, step, task.params, optimizer.init(task.params), (task.inputs, task.targets))


def _local(task: JaxTask) -> Arm:
    return _alone("no communication", task, _sgd())


def _horovod(task: JaxTask) -> Arm:
    task.params = hvd.broadcast_parameters(task.params, root_rank=0)
    return _alone("horovod", task, hvd.DistributedOptimizer(_sgd()))


def _gloo_arm(task: JaxTask) -> Arm:
    """JAX's own data parallelism: one program over all ranks' devices, gradients averaged with ``pmean``."""
    mesh, optimizer = ranks_mesh(), _sgd()
    everywhere, by_rank = PartitionSpec(), PartitionSpec(AXIS)

    def step(params: Any, state: Any, inputs: Any, targets: Any) -> Any:
        grads = jax.lax.pmean(jax.grad(task.loss)(params, inputs, targets), AXIS)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(everywhere, everywhere, by_rank, by_rank), out_specs=everywhere, check_vma=False
    )
    whole = NamedSharding(mesh, everywhere)

    def replicate(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(whole, np.asarray(leaf)), tree)

    data = (spread(mesh, task.inputs), spread(mesh, task.targets))
    return _make("jax gloo", mapped, replicate(task.params), replicate(optimizer.init(task.params)), data)


def arms(control: Agreement) -> Sequence[Callable[[JaxTask], Arm]]:
    """Return the ways to train."""
    start_jax(control)
    return (_local, _horovod, _gloo_arm)
