"""Collectives in functions that XLA compiles."""

from __future__ import annotations

import numpy as np
import pytest
from harness import on_ranks, run_ranks
from later import later

hvd, tf = later("horovod.tensorflow"), later("tensorflow")


@on_ranks(2, framework="tensorflow")
def test_programs_of_xla_hold_collectives_and_their_derivatives() -> None:
    rank = hvd.rank()

    @tf.function(jit_compile=True)
    def everything(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(hvd.allreduce(x * x, name="squares")) * (rank + 1.0)
        slope = tape.gradient(loss, x)
        one, two = hvd.grouped_allreduce([x, tf.cast(2 * x, tf.bfloat16)], op=hvd.Sum)
        return slope, one, two, hvd.broadcast(x, 1), hvd.reducescatter(x, op=hvd.Sum), hvd.size_op()

    slope, one, two, of_root, rows, size = everything(tf.ones([5]) * (rank + 1.0))
    np.testing.assert_allclose(slope, np.full(5, 3.0 * (rank + 1)))
    np.testing.assert_allclose(one, np.full(5, 3.0))
    np.testing.assert_allclose(tf.cast(two, tf.float32), np.full(5, 6.0))
    np.testing.assert_allclose(of_root, np.full(5, 2.0))
    np.testing.assert_allclose(rows, np.full(3 - rank, 3.0))
    assert int(size) == 2


def _trains() -> list[float]:
    weights = [tf.Variable(tf.ones([2]) * number) for number in range(3)]

    @tf.function(jit_compile=True)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.add_n([weight * weight for weight in weights]) * x)
        grads = hvd.DistributedGradientTape(tape).gradient(loss, weights)
        for weight, grad in zip(weights, grads, strict=True):
            weight.assign_sub(0.1 * grad)

    for _ in range(3):
        step(tf.constant([1.0, 2.0]) * (hvd.rank() + 1.0))
    return [float(number) for weight in weights for number in weight]


def test_a_compiled_step_gives_all_ranks_the_same_weights() -> None:
    first, second = run_ranks(2, _trains, framework="tensorflow")
    assert first == second
    np.testing.assert_allclose(first, [0.0, 0.0, 0.7**3, 0.4**3, 2 * 0.7**3, 2 * 0.4**3], rtol=1e-6)


@on_ranks(2, framework="tensorflow")
def test_what_xla_cannot_hold_says_what_to_do_instead() -> None:
    @tf.function(jit_compile=True)
    def gather(x):
        return hvd.allgather(x)

    with pytest.raises(NotImplementedError, match=r"HorovodAllgather.*jit_compile=True.*outside of that function"):
        gather(tf.ones([3]))

    @tf.function(jit_compile=True)
    def reduce(x):
        return hvd.allreduce(x, name="uneven")

    with pytest.raises(tf.errors.InternalError, match=r"rank 0: \[3\](.|\n)*rank 1: \[4\]"):
        reduce(tf.ones([3 + hvd.rank()]))
