"""Work beside training: input workers, ranks with less work, another framework in the same process."""

from __future__ import annotations

import multiprocessing

from harness import on_ranks
from later import later

hvd, jax, jnp = later("horovod.jax"), later("jax"), later("jax.numpy")


@on_ranks(2, framework="jax", fresh=True, returns=[18.0, 18.0])
def test_input_workers_that_are_forked_or_spawned_disturb_nothing() -> float:
    # Before the first operation of JAX, as it asks for; and spawned ones at any time.
    with multiprocessing.get_context("fork").Pool(1) as forked:
        batches = forked.map(float, range(3))
        import jax
        import jax.numpy as jnp

        import horovod.jax as hvd

        program = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
        total = sum(float(program(jnp.full(2, batch))[0]) for batch in batches)
        batches = forked.map(float, range(3))
    with multiprocessing.get_context("spawn").Pool(1) as spawned:
        batches += spawned.map(float, range(3))
    total += sum(float(program(jnp.full(2, batch))[0]) for batch in batches)
    hvd.barrier()
    return total


@on_ranks(2, framework="jax", returns=[([3.0, 3.0], 1), ([3.0, 3.0, 2.0], 1)])
def test_ranks_that_joined_take_no_part() -> tuple[list[float], int]:
    program = jax.jit(lambda x: hvd.allreduce({"sum": x}, op=hvd.Sum)["sum"][0])
    seen = [float(program(jnp.ones(3) * (1 + hvd.rank()))) for _ in range(2 + hvd.rank())]
    last = hvd.join()
    hvd.barrier()
    return seen, last


@on_ranks(2, framework="jax", returns=[(1.0, 1.0)] * 2)
def test_torch_and_jax_in_one_process() -> tuple[float, float]:
    import torch

    import horovod.torch as hvd_torch

    program = jax.jit(lambda x: hvd.allreduce(x, name="x"))
    first = program(jnp.full(3, float(hvd.rank())))
    handle = hvd_torch.allreduce_async(torch.full((3,), float(hvd.rank())), name="y", op=hvd.Sum)
    second = program(first + hvd.rank())
    return float(second[0]), float(hvd_torch.synchronize(handle)[0])
